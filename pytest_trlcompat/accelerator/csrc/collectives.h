// Collectives: see collectives.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace trlcompat {

// A backend for tensors on the device, which hands every collective to `gloo`. With `ordered` false they complete as
// gloo's do: the project's own test shows with it what ordering is for. With `comparing`, ranks that disagree about a
// collective fail; `notes` is the descriptor of a file of `notes_bytes` zeros that all ranks have open, or -1 where they
// are on several machines. It may be closed afterwards. A rank that has waited for `patience` milliseconds looks whether
// another one disagrees, and again after every such time.
c10::intrusive_ptr<c10d::Backend> new_backend(
    const c10::intrusive_ptr<c10d::Backend>& gloo, bool ordered, bool comparing, int notes, int64_t patience);

}  // namespace trlcompat
