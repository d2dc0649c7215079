// Aliases: see aliases.h.
#include "aliases.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

namespace trlcompat {
namespace {

c10::Storage wrap(c10::DataPtr memory, size_t nbytes, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(memory), allocator, /*resizable=*/true));
}

// `tensor`, as it is, on another storage.
at::Tensor retarget(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  c10::DispatchKeySet keys(key);
  if (tensor._is_zerotensor()) keys = keys.add(c10::DispatchKey::ZeroTensor);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  // A wrapped number (the 2 in `x * 2`) takes no part in type promotion.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

}  // namespace

c10::Storage Aliases::cpu_storage(const c10::Storage& device) {
  for (const auto& pair : pairs_)
    if (pair.device.is_alias_of(device)) return pair.cpu;
  auto memory = lend_memory(device, c10::Device(c10::DeviceType::CPU));
  pairs_.push_back({device, wrap(std::move(memory), device.nbytes(), c10::GetCPUAllocator())});
  return pairs_.back().cpu;
}

at::Tensor Aliases::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  return retarget(tensor, cpu_storage(tensor.storage()), c10::DispatchKey::CPU);
}

std::vector<at::Tensor> Aliases::to_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(to_cpu(tensor));
  return result;
}

at::Tensor Aliases::to_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU || !tensor.has_storage()) return tensor;
  const c10::Storage& cpu = tensor.storage();
  for (const auto& pair : pairs_)
    if (pair.cpu.is_alias_of(cpu)) return retarget(tensor, pair.device, c10::DispatchKey::PrivateUse1);
  auto memory = lend_memory(cpu, device);
  pairs_.push_back({wrap(std::move(memory), cpu.nbytes(), device_allocator()), cpu});
  return retarget(tensor, pairs_.back().device, c10::DispatchKey::PrivateUse1);
}

void Aliases::adopt_reallocated() {
  for (auto& [device, cpu] : pairs_) {
    if (cpu.data() == device.data() && cpu.nbytes() == device.nbytes()) continue;
    auto* storage = device.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(lend_memory(cpu, device.device()));
    storage->set_nbytes(cpu.nbytes());
  }
}

void Aliases::adopt_shape(const at::Tensor& tensor, const at::Tensor& alias, const char* method) {
  if (tensor.device().type() != kDevice || same_shape(tensor, alias)) return;
  TORCH_CHECK(alias.storage().is_alias_of(cpu_storage(tensor.storage())), "the software accelerator cannot follow ",
              method, ", which gave an argument another storage; please report it");
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

}  // namespace trlcompat
