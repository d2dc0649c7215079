// The operators that the device has to have itself: creating, viewing, resizing and copying tensors.
#include "aliases.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include <algorithm>

namespace trlcompat {
namespace {

using at::IntArrayRef;
using at::Tensor;

// Bytes from the first element to behind the last one; 0 where there is no element.
size_t storage_nbytes(IntArrayRef sizes, IntArrayRef strides, size_t itemsize) {
  size_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(sizes[i] >= 0, "Trying to create tensor with negative dimension ", sizes[i], ": ", sizes);
    if (sizes[i] != 0) elements += static_cast<size_t>(strides[i]) * static_cast<size_t>(sizes[i] - 1);
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  return empty ? 0 : elements * itemsize;
}

// ---- creating
Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const auto type = dtype ? c10::scalarTypeToTypeMeta(*dtype) : c10::get_default_dtype();
  const auto nbytes = storage_nbytes(sizes, strides, type.itemsize());
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      new_storage(resolve(device), nbytes), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

Tensor empty(
    IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  c10::DimVector strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  auto result = empty_strided(sizes, strides, dtype, layout, device, pinned);
  const auto wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted != at::MemoryFormat::Contiguous && wanted != at::MemoryFormat::Preserve)
    result.unsafeGetTensorImpl()->empty_tensor_restride(wanted);
  return result;
}

// Zeros without memory, of which derivatives are made that are zero everywhere, as of sgn. torch gives every operator
// that cannot deal with one a tensor of zeros instead.
Tensor efficientzerotensor(
    IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const auto type = dtype ? c10::scalarTypeToTypeMeta(*dtype) : c10::get_default_dtype();
  const size_t nbytes = c10::multiply_integers(sizes) * type.itemsize();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, resolve(device)), nullptr, /*resizable=*/false));
  const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, type);
  result.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return result;
}

// ---- viewing: the same as on any device, because only sizes and strides change
Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
Tensor view(const Tensor& self, IntArrayRef sizes) { return at::native::view(self, sizes); }
Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// ---- copying: the one thing that may be done between devices
Tensor copy_from(const Tensor& self, const Tensor& to, bool /*non_blocking*/) {
  Aliases aliases;
  aliases.to_cpu(to).copy_(aliases.to_cpu(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// ---- resizing and replacing storages
const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {  // else the strides stay too, as on every device
    impl->set_sizes_contiguous(sizes);
    const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
    if (impl->numel() != 0 && needed > impl->unsafe_storage().nbytes())
      resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_sized(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const bool contiguous = strides.data() == nullptr || (strides.empty() && !sizes.empty());
  if (contiguous) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_sized(self, std::move(storage), 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_sized(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) { return set_sized(self, new_storage(self.device(), 0), 0, {0}, {1}); }

// Lets `p.data = p.to("npu")` and Module.to() keep the same Parameter, as CUDA does: FSDP1, tied weights and optimizers
// that were made before the move rely on it.
bool may_share_parameter(const Tensor& self, const Tensor& other) {
  const auto dense = [](const Tensor& tensor) {
    const auto type = tensor.device().type();
    return tensor.layout() == at::kStrided && (type == kDevice || type == c10::DeviceType::CPU);
  };
  return dense(self) && dense(other);
}

void record_stream(Tensor&, c10::Stream) {}

#if !TRLCOMPAT_TORCH_AT_LEAST(2, 5)
// Pinned memory, which later releases ask the device's hooks about.
bool is_pinned_memory(const Tensor& self, std::optional<c10::Device>) { return is_pinned(self.storage().data()); }
Tensor pin_memory(const Tensor& self, std::optional<c10::Device>) {
  const auto nbytes = storage_nbytes(self.sizes(), self.strides(), self.itemsize());
  auto result = at::empty({0}, self.options());
  result.set_(c10::Storage(c10::Storage::use_byte_size_t(), nbytes, pinned_allocator()), 0, self.sizes(), self.strides());
  return result.copy_(self);
}
#endif

}  // namespace
}  // namespace trlcompat

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace trlcompat;
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(efficientzerotensor));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_sized));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_share_parameter));
  m.impl("record_stream", TORCH_FN(record_stream));
#if !TRLCOMPAT_TORCH_AT_LEAST(2, 5)
  m.impl("is_pinned", TORCH_FN(is_pinned_memory));
  m.impl("_pin_memory", TORCH_FN(pin_memory));
#endif
}

// A lazily conjugated or negated tensor is resolved by copying it, so the copy itself has to take it as it is: torch's
// own copy_ is exempt for that reason, and it ends here.
const auto take_lazy_tensors = [](torch::Library& m) {
  for (const char* name : {"_copy_from", "_copy_from_and_resize"}) m.impl(name, torch::CppFunction::makeFallthrough());
};
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { take_lazy_tensors(m); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { take_lazy_tensors(m); }
