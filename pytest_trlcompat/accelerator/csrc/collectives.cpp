// Collectives: gloo's, on aliases of the device's memory, completing in the order in which they were started.
//
// NCCL orders collectives by stream; gloo does not, and callers that wait only for the last of several (DeepSpeed
// before 0.19.8, its PR 8539) then read memory that is still being written. So each collective is waited for when it
// starts. Point-to-point operations are apart: waiting at once for a send whose receive is posted later never ends.
//
// Ranks that disagree about a collective wait for gloo's timeout, are aborted by it, or exchange what happens to fit.
// So they may be asked to compare first what each is about to do. On one machine each leaves a note where all can read
// it and waits for nobody: of two that disagree the later one sees it, before it has begun, and the other one finds the
// note when it has waited for a moment. On several machines they compare in one small exchange. PyTorch's own wrapper,
// which compares for gloo and NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL, takes three, and makes ZeRO-3 twice as slow.
#include "collectives.h"

#include "aliases.h"
#include "notes.h"

#include <ATen/core/List.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <type_traits>

namespace trlcompat {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors flatten(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// One collective on its way. `outputs` are on the device: DDP's reducer takes its bucket from the future's value.
class Collective final : public c10d::Work {
 public:
  Collective(
      WorkPtr gloo, Tensors outputs, Tensors averaged, int64_t divisor, std::shared_ptr<const Notes> notes,
      Fingerprint fingerprint, std::chrono::milliseconds patience)
      : gloo_(std::move(gloo)),
        outputs_(std::move(outputs)),
        averaged_(std::move(averaged)),
        divisor_(divisor),
        notes_(std::move(notes)),
        fingerprint_(fingerprint),
        patience_(patience) {}

  // Only once, since gloo's reduce_scatter copies its result out again at every wait().
  void complete(std::chrono::milliseconds timeout = kNoTimeout) {
    std::lock_guard<std::mutex> lock(completing_);
    if (gloo_ == nullptr) return;
    wait_for_gloo(timeout);
    for (auto& tensor : averaged_) tensor.div_(divisor_);
    gloo_ = nullptr;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    complete(timeout);
    return true;
  }
  void synchronize() override { complete(); }
  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(completing_);
    return gloo_ == nullptr || gloo_->isCompleted();
  }
  bool isSuccess() const override { return true; }  // a failure was thrown by wait()
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    complete();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(c10::List<at::Tensor>(outputs_)));
    return future;
  }

 private:
  void wait_for_gloo(std::chrono::milliseconds timeout) {
    if (notes_ == nullptr) {
      gloo_->wait(timeout);
      return;
    }
    for (auto waited = patience_;; waited += patience_) {
      try {
        gloo_->wait(timeout == kNoTimeout ? patience_ : std::min(patience_, timeout));
        return;
      } catch (const std::exception&) {  // one that disagrees has left, or has not come, or nothing is wrong yet
        notes_->compare(fingerprint_);
        if (gloo_->isCompleted()) break;  // it has failed, or it came right after the patience had run out
        if (timeout != kNoTimeout && waited >= timeout) throw;
      }
    }
    gloo_->wait();  // at once, and with its own error if it has failed
  }

  std::mutex completing_;
  WorkPtr gloo_;
  Tensors outputs_;
  Tensors averaged_;
  int64_t divisor_;
  std::shared_ptr<const Notes> notes_;
  Fingerprint fingerprint_;
  std::chrono::milliseconds patience_;
};

at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto type = tensor.device().type();
  TORCH_CHECK(type == kDevice, "No backend type associated with device type ", type);
  return Aliases().to_cpu(tensor);
}
Tensors on_cpu(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(on_cpu(tensor));
  return result;
}
TensorLists on_cpu(const TensorLists& lists) {
  TensorLists result;
  for (const auto& list : lists) result.push_back(on_cpu(list));
  return result;
}
// NCCL compares numbers of elements where gloo compares shapes.
at::Tensor on_cpu_flat(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  return on_cpu(tensor).view({-1});
}

// Calls `function` with `object`, unless its constraint says that the class of `object` lacks what it needs.
template <class Object, class Function>
void if_it_can(Object& object, Function function) {
  if constexpr (std::is_invocable_v<Function, Object&>) function(object);
}

class Backend final : public c10d::Backend {
 public:
  Backend(
      c10::intrusive_ptr<c10d::Backend> gloo, bool ordered, bool comparing, int notes,
      std::chrono::milliseconds patience)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        ordered_(ordered),
        comparing_(comparing && gloo_->getSize() > 1),
        notes_(notes < 0 ? nullptr : std::make_shared<Notes>(notes, getRank(), getSize())),
        patience_(patience) {}

  const std::string getBackendName() const override { return "hccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    compare(c10d::OpType::BROADCAST, tensors);
    auto aliases = on_cpu(tensors);
    return started(gloo_->broadcast(aliases, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    compare(c10d::OpType::ALLREDUCE, tensors);
    auto aliases = on_cpu(tensors);
    return started(gloo_->allreduce(aliases, summing(options)), tensors, averaged(options, aliases));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    compare(c10d::OpType::ALLREDUCE_COALESCED, tensors);
    auto aliases = on_cpu(tensors);
    return started(gloo_->allreduce_coalesced(aliases, summing(options)), tensors, averaged(options, aliases));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    compare(c10d::OpType::REDUCE, tensors);
    auto aliases = on_cpu(tensors);
    auto work = gloo_->reduce(aliases, summing(options));
    const bool receives = options.rootRank == getRank();
    return started(std::move(work), tensors, receives ? averaged(options, aliases) : Tensors());
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    compare(c10d::OpType::ALLGATHER, inputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->allgather(to, from, options), flatten(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    compare(c10d::OpType::_ALLGATHER_BASE, {input});
    auto to = on_cpu_flat(output);
    auto from = on_cpu_flat(input);
    return started(gloo_->_allgather_base(to, from, options), {output});
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    compare(c10d::OpType::ALLGATHER_COALESCED, inputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->allgather_coalesced(to, from, options), flatten(outputs));
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    compare(c10d::OpType::ALLGATHER_COALESCED, inputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->allgather_into_tensor_coalesced(to, from, options), outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    compare(c10d::OpType::GATHER, inputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->gather(to, from, options), flatten(outputs));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    compare(c10d::OpType::SCATTER, outputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->scatter(to, from, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    compare(c10d::OpType::REDUCE_SCATTER, outputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(reduce_scatter_by_gloo(to, from, summing(options)), outputs, averaged(options, to));
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    compare(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
    auto to = on_cpu_flat(output);
    auto from = on_cpu_flat(input);
    return started(gloo_->_reduce_scatter_base(to, from, summing(options)), {output}, averaged(options, {to}));
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    compare(c10d::OpType::REDUCE_SCATTER, outputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->reduce_scatter_tensor_coalesced(to, from, summing(options)), outputs, averaged(options, to));
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    compare(c10d::OpType::ALLTOALL_BASE, {});
    auto to = on_cpu(output);
    auto from = on_cpu(input);
    return started(gloo_->alltoall_base(to, from, output_splits, input_splits, options), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
#if !TRLCOMPAT_TORCH_AT_LEAST(2, 12)
    TORCH_CHECK(false, "the software accelerator has no all_to_all of lists with this torch: gloo, on which it stands, ",
                "has it from torch 2.12 on");
#endif
    compare(c10d::OpType::ALLTOALL, {});
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return started(gloo_->alltoall(to, from, options), outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    compare(c10d::OpType::BARRIER, {});
    auto anywhere = options;  // gloo knows nothing of the device that accelerators name here
    anywhere.device_ids.clear();
    anywhere.device = std::nullopt;
    return started(gloo_->barrier(anywhere), {});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto aliases = on_cpu(tensors);
    return gloo_->send(aliases, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto aliases = on_cpu(tensors);
    return gloo_->recv(aliases, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto aliases = on_cpu(tensors);
    return gloo_->recvAnysource(aliases, tag);
  }

  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  // These three are no part of a backend in every torch (2.9 and 2.7 brought them).
  void setTimeout(std::chrono::milliseconds timeout) {
    if_it_can(*gloo_, [&](auto& gloo) requires requires { gloo.setTimeout(timeout); } { gloo.setTimeout(timeout); });
  }
  void abort() {
    if_it_can(*gloo_, [](auto& gloo) requires requires { gloo.abort(); } { gloo.abort(); });
  }
  void shutdown() {
    if_it_can(*gloo_, [](auto& gloo) requires requires { gloo.shutdown(); } { gloo.shutdown(); });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool ordered_;
  bool comparing_;
  std::shared_ptr<Notes> notes_;
  std::chrono::milliseconds patience_;
  Fingerprint last_;

  // Of all-to-all alone sizes may differ among ranks.
  void compare(c10d::OpType operation, const Tensors& tensors) {
    if (!comparing_) return;
    last_ = Fingerprint(operation, last_.number() + 1, tensors);
    if (notes_ != nullptr) {
      notes_->leave(last_);
      notes_->compare(last_);
      return;
    }
    auto words = at::from_blob(last_.words.data(), {Fingerprint::kWords}, at::kLong);
    auto all = at::empty({getSize() * Fingerprint::kWords}, at::kLong);
    gloo_->_allgather_base(all, words, c10d::AllgatherOptions())->wait();
    for (int64_t rank = 0; rank < getSize(); ++rank) {
      Fingerprint other;
      std::copy_n(all.const_data_ptr<int64_t>() + rank * Fingerprint::kWords, Fingerprint::kWords, other.words.data());
      if (!last_.agrees(other)) disagree(getRank(), last_, rank, other);
    }
  }

  WorkPtr started(WorkPtr gloo, Tensors outputs, Tensors averaged = {}) const {
    auto work = c10::make_intrusive<Collective>(
        std::move(gloo), std::move(outputs), std::move(averaged), getSize(), notes_, last_, patience_);
    if (ordered_) work->complete();
    return work;
  }

#if TRLCOMPAT_TORCH_AT_LEAST(2, 8)
  WorkPtr reduce_scatter_by_gloo(Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& options) {
    return gloo_->reduce_scatter(to, from, options);
  }
#else
  // gloo had none: all ranks reduce everything, and each takes its own part.
  WorkPtr reduce_scatter_by_gloo(Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    all.timeout = options.timeout;
    WorkPtr last;
    for (size_t i = 0; i < to.size(); ++i)
      for (size_t rank = 0; rank < from[i].size(); ++rank) {
        Tensors whole{from[i][rank].clone()};
        last = gloo_->allreduce(whole, all);
        last->wait();
        if (static_cast<int>(rank) == getRank()) to[i].copy_(whole[0]);
      }
    return last;
  }
#endif

  // gloo has no average: it sums, and the sum is divided when it is there.
  template <class Options>
  static Options summing(Options options) {
    if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }
  template <class Options>
  static Tensors averaged(const Options& options, Tensors aliases) {
    return options.reduceOp == c10d::ReduceOp::AVG ? std::move(aliases) : Tensors();
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> new_backend(
    const c10::intrusive_ptr<c10d::Backend>& gloo, bool ordered, bool comparing, int notes, int64_t patience) {
  return c10::make_intrusive<Backend>(gloo, ordered, comparing, notes, std::chrono::milliseconds(patience));
}

}  // namespace trlcompat
