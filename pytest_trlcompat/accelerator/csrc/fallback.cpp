// The fallback: every operator that has no kernel of the device's own runs the CPU's, on aliases of the same memory.
//
// It first refuses what a GPU refuses. That check is the reason why this device exists.
#include "aliases.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace trlcompat {
namespace {

using c10::IValue;
using torch::jit::Stack;

template <class Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

// Replaces each tensor in `value` by what `function` makes of it.
template <class Function>
void map_tensors(IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = IValue(function(value.toTensor()));
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors)
      if (tensor.defined()) tensor = function(tensor);
    value = IValue(c10::List<at::Tensor>(std::move(tensors)));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    value = IValue(std::move(tensors));
  }
}

// The arguments of one call: the last values of the stack.
struct Arguments {
  const c10::FunctionSchema& schema;
  IValue* values;
  size_t size;

  Arguments(const c10::FunctionSchema& s, Stack& stack)
      : schema(s), values(stack.data() + stack.size() - s.arguments().size()), size(s.arguments().size()) {}

  const std::string& name(size_t i) const { return schema.arguments()[i].name(); }
  const c10::AliasInfo* alias_info(size_t i) const { return schema.arguments()[i].alias_info(); }
  bool is_written(size_t i) const { return alias_info(i) != nullptr && alias_info(i)->isWrite(); }
  IValue* begin() const { return values; }
  IValue* end() const { return values + size; }
};

// The device of the call: that of a tensor with dimensions, else of a number on the device, else the requested one.
struct CallDevice {
  c10::Device device;
  bool has_tensors;  // false for factories: arange, randperm
};

CallDevice find_device(const Arguments& arguments) {
  std::optional<c10::Device> of_tensor, of_number, requested;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.device().type() != kDevice) return;
      auto& found = tensor.dim() != 0 ? of_tensor : of_number;
      if (!found) found = tensor.device();
    });
    if (value.isDevice() && value.toDevice().type() == kDevice && !requested) requested = value.toDevice();
    if (value.isGenerator() && value.toGenerator().device().type() == kDevice && !requested)
      requested = value.toGenerator().device();
  }
  const bool has_tensors = of_tensor || of_number;
  return {resolve(of_tensor ? of_tensor : of_number ? of_number : requested), has_tensors};
}

// Indexing takes CPU indices on every device.
bool accepts_cpu_indices(std::string_view method) {
  return method == "aten::index" || method == "aten::index_put" || method == "aten::index_put_" ||
      method == "aten::_index_put_impl_";
}

// Copying is the one thing that may be done between devices; dense tensors do it in operators.cpp.
bool copies(std::string_view method) { return method == "aten::copy_" || method == "aten::copy_sparse_to_sparse_"; }

void check_devices(const Arguments& arguments, const CallDevice& call) {
  const std::string& method = arguments.schema.name();
  for (size_t i = 0; i < arguments.size; ++i) {
    const IValue& value = arguments.values[i];
    TORCH_CHECK(!value.isGenerator() || value.toGenerator().device().type() == kDevice, "Expected a '", call.device,
                "' device type for generator but found '", value.toGenerator().device(), "'");
    if (!call.has_tensors || copies(method)) continue;
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      const auto device = tensor.device();
      if (device == call.device || device.type() == c10::DeviceType::Meta) return;
      if (device.type() == c10::DeviceType::CPU) {
        const bool is_number = tensor.dim() == 0 && !arguments.is_written(i);
        if (is_number || (arguments.name(i) == "indices" && accepts_cpu_indices(method))) return;
      }
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", arguments.name(i), " is on ",
                  device, ", different from other tensors on ", call.device,
                  " (when checking argument in method ", method, ")");
    });
  }
}

using Written = std::vector<std::pair<at::Tensor, at::Tensor>>;  // an argument that is written to, and its alias

Written move_arguments_to_cpu(const Arguments& arguments, const CallDevice& call, c10::DispatchKey cpu,
                              Aliases& aliases) {
  Written written;
  for (size_t i = 0; i < arguments.size; ++i) {
    IValue& value = arguments.values[i];
    if (value.isDevice()) {
      value = IValue(c10::Device(c10::DeviceType::CPU));
    } else if (value.isGenerator()) {
      value = IValue(cpu_generator(value.toGenerator()));
    } else if (value.isNone()) {
      // Without this the kernel would draw from the CPU's default generator, which torch.npu.manual_seed does not seed.
      if (arguments.name(i) == "generator") value = IValue(cpu_generator(default_generator(call.device.index())));
    } else {
      map_tensors(value, [&](const at::Tensor& tensor) {
        auto alias = aliases.to_cpu(tensor);
        // Kernels for sparse tensors ask whether there will be a backward pass, and keep what it needs.
        if (cpu != c10::DispatchKey::CPU && tensor.requires_grad()) alias.set_requires_grad(true);
        if (arguments.is_written(i)) written.emplace_back(tensor, alias);
        return alias;
      });
    }
  }
  return written;
}

// The argument that the return value `result` stands for (`self` of add_, `out` of add.out), if there is one.
std::optional<size_t> returned_argument(const Arguments& arguments, const c10::Argument& result) {
  if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return std::nullopt;
  for (size_t i = 0; i < arguments.size; ++i)
    if (arguments.is_written(i) && arguments.alias_info(i)->beforeSets() == result.alias_info()->beforeSets()) return i;
  return std::nullopt;
}

bool is_traced() {
  static const bool traced = std::getenv("TRLCOMPAT_ACCELERATOR_TRACE") != nullptr;
  return traced;
}

}  // namespace

// Runs the kernel that the CPU has under `cpu`: the one for dense tensors, or one for sparse tensors.
template <c10::DispatchKey cpu>
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  if (is_traced()) std::fprintf(stderr, "[accelerator] %s.%s\n", schema.name().c_str(), schema.overload_name().c_str());
  const Arguments arguments(schema, *stack);
  const CallDevice call = find_device(arguments);
  check_devices(arguments, call);

  const std::vector<IValue> originals(arguments.begin(), arguments.end());
  // An argument may be named by a result; which one is looked up before the call takes the arguments from the stack.
  c10::SmallVector<std::optional<size_t>, 4> returned;
  for (const auto& result : schema.returns()) returned.push_back(returned_argument(arguments, result));

  Aliases aliases;
  const Written written = move_arguments_to_cpu(arguments, call, cpu, aliases);
  op.redispatchBoxed(c10::DispatchKeySet(cpu), stack);
  if (!written.empty()) aliases.adopt_reallocated();
  for (const auto& [tensor, alias] : written) aliases.adopt_form(tensor, alias, schema.name().c_str());

  IValue* results = stack->data() + stack->size() - returned.size();
  for (size_t i = 0; i < returned.size(); ++i) {
    if (returned[i])
      results[i] = originals[*returned[i]];
    else
      map_tensors(results[i], [&](const at::Tensor& tensor) { return aliases.to_device(tensor, call.device); });
  }
}

namespace {

template <c10::DispatchKey cpu>
torch::CppFunction boxed_fallback() {
  return torch::CppFunction::makeFromBoxedFunction<&fallback<cpu>>();
}

// For some operators torch has a composite of other operators besides the CPU's kernel, and gives a new device the
// composite, which may round differently. Bitwise equality with the CPU needs the CPU's kernel. Indexing does not round,
// and its composite refuses tensors of several devices in the words that a GPU's users read.
template <c10::DispatchKey cpu>
void prefer_kernels_to_composites(torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name == "aten::index" || name.name == "aten::index_add") continue;
    const auto op = name.name.rfind("aten::", 0) == 0 ? dispatcher.findOp(name) : std::nullopt;
    if (!op || !op->hasKernelForDispatchKey(cpu)) continue;
    for (const auto composite : {c10::DispatchKey::CompositeExplicitAutograd,
                                 c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                                 c10::DispatchKey::CompositeImplicitAutograd}) {
      if (!op->hasKernelForDispatchKey(composite)) continue;
      m.impl(c10::toString(name).c_str(), boxed_fallback<cpu>());
      break;
    }
  }
}

}  // namespace
}  // namespace trlcompat

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(trlcompat::boxed_fallback<c10::DispatchKey::CPU>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(trlcompat::boxed_fallback<c10::DispatchKey::SparseCPU>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(trlcompat::boxed_fallback<c10::DispatchKey::SparseCsrCPU>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  trlcompat::prefer_kernels_to_composites<c10::DispatchKey::CPU>(m);
  // These choose a kernel by the device of their arguments, and would find none for this one.
  for (const char* name : {"convolution", "convolution_backward", "conj_physical_", "mode.values", "nanmean.out"})
    m.impl(name, trlcompat::boxed_fallback<c10::DispatchKey::CPU>());
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  trlcompat::prefer_kernels_to_composites<c10::DispatchKey::SparseCPU>(m);
}
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  trlcompat::prefer_kernels_to_composites<c10::DispatchKey::SparseCsrCPU>(m);
}
