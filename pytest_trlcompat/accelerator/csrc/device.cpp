// The device as PyTorch sees it: how many there are, which is current, its streams and events, and its hooks.
//
// Every operation has finished when it returns, so a stream is a number, an event is a point in time, and to
// synchronise is to do nothing.
#include "accelerator.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

namespace trlcompat {
namespace {

constexpr const char* kCountVariable = "TRLCOMPAT_ACCELERATOR_DEVICES";

thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;
std::atomic<c10::DeviceIndex> shown{0};  // 0: all there are
std::atomic<c10::StreamId> last_stream{0};  // 0 is the default stream of every device

c10::DeviceIndex read_device_count() {
  const char* text = std::getenv(kCountVariable);
  if (text == nullptr || *text == '\0') return 2;
  constexpr int most = std::numeric_limits<c10::DeviceIndex>::max();
  const std::string_view digits(text);
  int count = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), count);
  TORCH_CHECK(error == std::errc() && end == digits.end() && count >= 1 && count <= most,
              kCountVariable, " must be a whole number from 1 to ", most, ", not '", text, "'");
  return static_cast<c10::DeviceIndex>(count);
}

// An index below 0 means "stay where you are", as in torch's own guards.
c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto previous = current;
  if (index >= 0) set_current_device(index);
  return previous;
}

// Without `override` where a torch asks for the same in another way, or not at all.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kDevice, current); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const { return is_pinned(address); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const {
    return default_generator(resolve(c10::Device(kDevice, index)).index());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) {
    return std::as_const(*this).getDefaultGenerator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const {
    return new_generator(resolve(c10::Device(kDevice, index)).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

using Instant = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return c10::Device(kDevice, current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDevice, exchange(device.index()));
  }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }

  // Neither may raise in an older torch, so neither looks whether there is such a device.
  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(device.index() < 0 ? current : device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, resolve(device), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return exchange_current_stream(stream); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Instant;
    *static_cast<Instant*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Instant*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> elapsed =
        *static_cast<Instant*>(end) - *static_cast<Instant*>(start);
    return elapsed.count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex all = read_device_count();
  const auto some = shown.load();
  return some == 0 ? all : some;
}

void show_devices(int count) {
  TORCH_CHECK(count >= 1 && count <= device_count(), "cannot show ", count, " of ", static_cast<int>(device_count()),
              " software accelerator device(s)");
  shown = static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() { return current; }

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), current_streams[index]);
}

c10::Stream exchange_current_stream(c10::Stream stream) {
  const auto previous = current_stream(stream.device_index());
  current_streams[stream.device_index()] = stream.id();
  return previous;
}

void set_current_device(c10::DeviceIndex index) {
  current = existing(index);
}

c10::Device resolve(std::optional<c10::Device> device) {
  if (!device || device->index() < 0) return c10::Device(kDevice, current);
  existing(device->index());
  return *device;
}

c10::DeviceIndex existing(int index) {
  const int count = device_count();
  TORCH_CHECK(index >= 0 && index < count, "invalid device ordinal ", index, ": the software accelerator has ", count,
              " device(s), npu:0 to npu:", count - 1, " (", kCountVariable, " sets how many)");
  return static_cast<c10::DeviceIndex>(index);
}

void register_hooks() {
  device_count();  // raises for a malformed number: later it is asked for where nothing may be raised
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace trlcompat
