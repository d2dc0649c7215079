#include "notes.h"

#include <torch/csrc/distributed/c10d/exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sstream>

namespace trlcompat {

Fingerprint::Fingerprint(c10d::OpType operation, int64_t number, const std::vector<at::Tensor>& tensors) {
  words[kOperation] = static_cast<int64_t>(operation);
  words[kNumber] = number;
  words[kTensors] = static_cast<int64_t>(tensors.size());
  for (const auto& tensor : tensors) words[kElements] += tensor.numel();
  if (tensors.empty()) return;
  const auto& first = tensors.front();
  words[kType] = static_cast<int64_t>(first.scalar_type());
  words[kDimensions] = first.dim();
  for (int64_t i = 0; i < first.dim() && kSizes + i < kWords; ++i) words[kSizes + i] = first.size(i);
}

bool Fingerprint::agrees(const Fingerprint& other) const {
  return std::equal(words.begin(), words.begin() + kCompared, other.words.begin());
}

std::string Fingerprint::describe() const {
  std::ostringstream text;
  text << "OpType=" << c10d::opTypeToString(static_cast<c10d::OpType>(words[kOperation])) << " as collective "
       << words[kNumber] << " of its group";
  if (words[kTensors] == 0) return text.str();
  text << ", TensorShape=[";
  for (int64_t i = 0; i < words[kDimensions] && kSizes + i < kWords; ++i)
    text << (i == 0 ? "" : ", ") << words[kSizes + i];
  text << "], TensorDtype=" << c10::toString(static_cast<c10::ScalarType>(words[kType]));
  if (words[kTensors] > 1)
    text << ", the first of " << words[kTensors] << " tensors with " << words[kElements] << " elements in all";
  return text.str();
}

void disagree(int64_t rank, const Fingerprint& own, int64_t other_rank, const Fingerprint& other) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "Detected mismatch between collectives on ranks. Rank ", rank, " is running ", own.describe(), ", but rank ",
          other_rank, " is running ", other.describe(), "."));
}

// `number` is written last and read first and last, so that whoever finds it the same has read a whole note.
struct alignas(64) Notes::Note {
  std::atomic<int64_t> number;
  Fingerprint fingerprint;
};

// No rank runs this far ahead of another: a collective that has to wait for nobody is a broadcast's at its root, whose
// messages gloo hands to the sockets' buffers.
constexpr int64_t kKept = 1024;

int64_t Notes::bytes(int64_t size) { return size * kKept * static_cast<int64_t>(sizeof(Note)); }

Notes::Notes(int descriptor, int64_t rank, int64_t size) : rank_(rank), size_(size) {
  static_assert(std::atomic<int64_t>::is_always_lock_free, "processes share it");
  void* memory = mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  TORCH_CHECK(memory != MAP_FAILED, "cannot map the ranks' notes: ", std::strerror(errno));
  notes_ = static_cast<Note*>(memory);
}

Notes::~Notes() { munmap(notes_, bytes(size_)); }

Notes::Note& Notes::note(int64_t rank, int64_t number) const { return notes_[rank * kKept + number % kKept]; }

void Notes::leave(const Fingerprint& own) {
  Note& mine = note(rank_, own.number());
  mine.number.store(0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  mine.fingerprint = own;
  mine.number.store(own.number());
  // Of two ranks that leave notes and then look for the other's at the same time, one at least must see it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Notes::compare(const Fingerprint& own) const {
  for (int64_t rank = 0; rank < size_; ++rank) {
    const Note& theirs = note(rank, own.number());
    if (theirs.number.load() != own.number()) continue;  // not there yet: it will look at ours
    const Fingerprint other = theirs.fingerprint;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (theirs.number.load() == own.number() && !own.agrees(other)) disagree(rank_, own, rank, other);
  }
}

}  // namespace trlcompat
