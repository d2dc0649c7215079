// Aliases: see aliases.h.
#include "aliases.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
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

// Gives the sparse tensor `to` the shape of `from`, and what `move` makes of its indices and values.
template <class Move>
void adopt_parts(const at::Tensor& to, const at::Tensor& from, Move move) {
  if (from.layout() == at::kSparse) {
    const auto* source = at::sparse::get_sparse_impl(from);
    auto* impl = at::sparse::get_sparse_impl(to);
    impl->raw_resize_(source->sparse_dim(), source->dense_dim(), source->sizes());
    impl->set_indices_and_values_unsafe(move(source->indices()), move(source->values()));
    if (impl->coalesced() != source->coalesced()) impl->set_coalesced(source->coalesced());
  } else {
    const auto* source = at::sparse_csr::get_sparse_csr_impl(from);
    at::sparse_csr::get_sparse_csr_impl(to)->set_member_tensors(
        move(source->compressed_indices()), move(source->plain_indices()), move(source->values()), from.sizes());
  }
}

// A sparse tensor like `tensor` on another device.
template <class Move>
at::Tensor rebuild_sparse(const at::Tensor& tensor, c10::Device device, Move move) {
  const bool on_cpu = device.is_cpu();
  at::Tensor result;
  if (tensor.layout() == at::kSparse) {
    const auto key = on_cpu ? c10::DispatchKey::SparseCPU : c10::DispatchKey::SparsePrivateUse1;
    result = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), tensor.dtype());
  } else {
    TORCH_CHECK(at::sparse_csr::is_sparse_compressed(tensor), "the software accelerator has no tensors of layout ",
                tensor.layout());
    const auto key = on_cpu ? c10::DispatchKey::SparseCsrCPU : c10::DispatchKey::SparseCsrPrivateUse1;
    result = at::detail::make_tensor<at::SparseCsrTensorImpl>(
        c10::DispatchKeySet(key), device, tensor.layout(), tensor.dtype());
  }
  adopt_parts(result, tensor, move);
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
  if (!tensor.has_storage()) return sparse_to_cpu(tensor);
  return retarget(tensor, cpu_storage(tensor.storage()), c10::DispatchKey::CPU);
}

at::Tensor Aliases::sparse_to_cpu(const at::Tensor& tensor) {
  return rebuild_sparse(tensor, c10::Device(c10::DeviceType::CPU), [&](const at::Tensor& part) { return to_cpu(part); });
}

at::Tensor Aliases::sparse_to_device(const at::Tensor& tensor, c10::Device device) {
  return rebuild_sparse(tensor, device, [&](const at::Tensor& part) { return to_device(part, device); });
}

std::vector<at::Tensor> Aliases::to_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(to_cpu(tensor));
  return result;
}

at::Tensor Aliases::to_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) return tensor;
  if (!tensor.has_storage()) return sparse_to_device(tensor, device);
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

void Aliases::adopt_form(const at::Tensor& tensor, const at::Tensor& alias, const char* method) {
  if (tensor.device().type() != kDevice) return;
  if (!tensor.has_storage())
    return adopt_parts(tensor, alias, [&](const at::Tensor& part) { return to_device(part, tensor.device()); });
  if (tensor.is_conj() != alias.is_conj()) tensor._set_conj(alias.is_conj());
  if (tensor.is_neg() != alias.is_neg()) tensor._set_neg(alias.is_neg());
  if (same_shape(tensor, alias)) return;
  TORCH_CHECK(alias.storage().is_alias_of(cpu_storage(tensor.storage())), "the software accelerator cannot follow ",
              method, ", which gave an argument another storage; please report it");
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

}  // namespace trlcompat
