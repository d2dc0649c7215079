// Random numbers: each device's generator stands on a CPU generator, so that a seed draws the CPU's own numbers.
#include "accelerator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <c10/core/GeneratorImpl.h>

#include <vector>

namespace trlcompat {
namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  DeviceGenerator(c10::DeviceIndex index, at::Generator generator)
      : GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(generator)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), cpu.clone()); }
};

#if !TRLCOMPAT_TORCH_AT_LEAST(2, 7)
// torch.Generator("npu"), which later releases make by the device's hooks.
at::Generator make_generator(c10::DeviceIndex index) {
  return new_generator(resolve(c10::Device(kDevice, index)).index());
}
REGISTER_GENERATOR_PRIVATEUSE1(make_generator)
#endif

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  // Never destroyed, like torch's own. A forked process has the state of its parent: whoever forks has to reseed.
  static const auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> all;
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) all.push_back(new_generator(i));
    return all;
  }());
  return generators.at(static_cast<size_t>(index));
}

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace trlcompat
