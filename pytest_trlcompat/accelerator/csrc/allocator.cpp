// Memory: the device's (host memory that carries a device's label and is counted per device), and "pinned" memory.
#include "accelerator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#if TRLCOMPAT_TORCH_AT_LEAST(2, 9)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

namespace trlcompat {
namespace {

// ---- counters: backward threads allocate beside the main one, hence atomic
struct Counter {
  std::atomic<int64_t> current{0}, peak{0}, allocated{0}, freed{0};

  void add(size_t nbytes) {
    const auto bytes = static_cast<int64_t>(nbytes);
    const int64_t now = current.fetch_add(bytes) + bytes;
    allocated += bytes;
    for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
    }
  }
  void remove(size_t nbytes) {
    const auto bytes = static_cast<int64_t>(nbytes);
    current -= bytes;
    freed += bytes;
  }
};
// One per possible index, so that counting needs no lock and outlives every tensor at exit.
std::array<Counter, std::numeric_limits<c10::DeviceIndex>::max() + 1> counters;

Counter& counter(c10::DeviceIndex index) { return counters[static_cast<size_t>(index)]; }

// ---- device memory
// What a DataPtr has to give back: memory of its own, or a storage whose memory it borrows.
struct Block {
  void* memory;
  c10::Storage owner;
  size_t nbytes;
  Counter* counted;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->counted != nullptr) block->counted->remove(block->nbytes);
  if (block->memory != nullptr) c10::free_cpu(block->memory);
  delete block;
}

c10::DataPtr allocate_on(c10::Device device, size_t nbytes) {
  if (nbytes == 0) return {nullptr, device};
  void* memory = c10::alloc_cpu(nbytes);
  Counter& count = counter(device.index());
  count.add(nbytes);
  return {memory, new Block{memory, {}, nbytes, &count}, &release, device};
}

#if TRLCOMPAT_TORCH_AT_LEAST(2, 9)
using AllocatorInterface = c10::DeviceAllocator;  // torch.accelerator's memory functions ask for it
#else
using AllocatorInterface = c10::Allocator;
#endif

struct HostMemory final : AllocatorInterface {
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(resolve(std::nullopt), nbytes); }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

#if TRLCOMPAT_TORCH_AT_LEAST(2, 9)
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Counter& count = counter(index);
    c10::CachingAllocator::Stat bytes;
    bytes.current = count.current;
    bytes.peak = count.peak;
    bytes.allocated = count.allocated;
    bytes.freed = count.freed;
    c10::CachingDeviceAllocator::DeviceStats stats;
    // Nothing is cached, so what is allocated is what is reserved and what is active.
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      (*kind)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)] = bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override { counter(index).allocated = counter(index).freed = 0; }
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak_memory(index); }
#endif
};
HostMemory host_memory;
REGISTER_ALLOCATOR(kDevice, &host_memory)

// ---- "pinned" memory: host memory whose addresses are remembered, for DDP and DataLoader ask whether one is pinned
std::mutex pinned_mutex;
// Never destroyed: tensors may be freed after this library's static objects.
std::map<const char*, size_t>& pinned_blocks = *new std::map<const char*, size_t>;

void release_pinned(void* memory) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const char*>(memory));
  }
  c10::free_cpu(memory);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    nbytes = std::max<size_t>(nbytes, 1);  // an empty tensor's address is asked about as well
    void* memory = c10::alloc_cpu(nbytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(memory)] = nbytes;
    return {memory, memory, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
PinnedMemory pinned_memory;

}  // namespace

MemoryCounts memory_counts(c10::DeviceIndex index) { return {counter(index).current, counter(index).peak}; }

void reset_peak_memory(c10::DeviceIndex index) { counter(index).peak = counter(index).current.load(); }

c10::Storage new_storage(c10::Device device, size_t nbytes) {
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), nbytes, allocate_on(device, nbytes), &host_memory, /*resizable=*/true));
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto memory = allocate_on(storage->device(), nbytes);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept != 0 && storage->data() != nullptr) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes);
}

c10::DataPtr lend_memory(const c10::Storage& owner, c10::Device device) {
  Counter* count = device.type() == kDevice ? &counter(device.index()) : nullptr;
  if (count != nullptr) count->add(owner.nbytes());
  return {owner.mutable_data(), new Block{nullptr, owner, owner.nbytes(), count}, &release, device};
}

c10::Allocator* device_allocator() { return &host_memory; }

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned_blocks.upper_bound(wanted);
  if (after == pinned_blocks.begin()) return false;
  const auto& [start, nbytes] = *std::prev(after);
  return wanted < start + nbytes;
}

}  // namespace trlcompat
