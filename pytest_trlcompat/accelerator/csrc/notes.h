// What ranks are about to do, and how those of one machine exchange it.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <string>
#include <vector>

namespace trlcompat {

// A collective that a rank is about to begin. The words up to kCompared must be the same on all ranks; as for NCCL, the
// number of elements counts and not the shape, which is told for people.
struct Fingerprint {
  enum Word : int64_t { kOperation, kType, kTensors, kElements, kCompared, kNumber = kCompared, kDimensions, kSizes };
  static constexpr int64_t kWords = kSizes + 6;

  std::array<int64_t, kWords> words{};

  Fingerprint() = default;
  // `number`: how many collectives its group has had, from 1.
  Fingerprint(c10d::OpType operation, int64_t number, const std::vector<at::Tensor>& tensors);

  int64_t number() const { return words[kNumber]; }
  bool agrees(const Fingerprint& other) const;
  std::string describe() const;
};

// Throws what PyTorch's own wrapper says of ranks that disagree.
[[noreturn]] void disagree(int64_t rank, const Fingerprint& own, int64_t other_rank, const Fingerprint& other);

// A piece of memory that the ranks of a group share. Each has a row of its own, in which it leaves its fingerprints.
class Notes {
 public:
  // `descriptor`: of a file of bytes(size) zeros.
  Notes(int descriptor, int64_t rank, int64_t size);
  ~Notes();
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;

  static int64_t bytes(int64_t size);

  void leave(const Fingerprint& own);
  // Throws when another rank has left another fingerprint for the same collective of the group.
  void compare(const Fingerprint& own) const;

 private:
  struct Note;
  Note& note(int64_t rank, int64_t number) const;

  Note* notes_;
  int64_t rank_;
  int64_t size_;
};

}  // namespace trlcompat
