// The software accelerator: PyTorch's PrivateUse1 device on ordinary host memory, with the CPU's kernels.
//
// What one file of this folder may use of another is declared here (and in aliases.h), and nothing else. Memory and
// kernels are the host's, but the *labels* are a device's: a tensor on npu:0 never mixes with one on cpu or on npu:1,
// which is what makes placement bugs show.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/version.h>

#include <optional>

// PyTorch's interfaces grow from release to release. Where a class can be asked whether it has a function, the code does
// that (`if constexpr (requires { ... })`, or a function without `override`, which overrides where there is something to
// override); this is for the rest.
#define TRLCOMPAT_TORCH_AT_LEAST(major, minor) (TORCH_VERSION_MAJOR * 1000 + TORCH_VERSION_MINOR >= (major)*1000 + (minor))

namespace trlcompat {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// ---- device.cpp: which devices there are, and which one is current in this thread
c10::DeviceIndex device_count();
// From now on there are only the first `count` devices in this process, as with CUDA_VISIBLE_DEVICES.
void show_devices(int count);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_current_stream(c10::Stream stream);
void register_hooks();
// `index` itself; raises where there is no such device.
c10::DeviceIndex existing(int index);
// The device meant by `device`: the current one where no index is given. Raises for an index beyond the last.
c10::Device resolve(std::optional<c10::Device> device);

// ---- generator.cpp
at::Generator new_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);
// The CPU generator on which a device's generator stands: the one that CPU kernels can draw from.
at::Generator cpu_generator(const at::Generator& generator);

// ---- allocator.cpp
struct MemoryCounts {  // bytes, in this process
  int64_t current, peak;
};
MemoryCounts memory_counts(c10::DeviceIndex index);
void reset_peak_memory(c10::DeviceIndex index);
c10::Storage new_storage(c10::Device device, size_t nbytes);
void resize_storage(c10::StorageImpl* storage, size_t nbytes);
// The memory of `owner`, labelled with `device`; keeps `owner` alive. Memory that comes to a device counts as its own.
c10::DataPtr lend_memory(const c10::Storage& owner, c10::Device device);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace trlcompat
