// Aliases: the same memory as a CPU tensor and as a tensor on the device, so that a CPU kernel works on it in place.
#pragma once

#include "accelerator.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace trlcompat {

// The aliases of one call. They belong together: arguments that share a storage must share its alias, so that a result
// which is a view of an argument can be told from a new tensor, and so that a reallocation is seen by all of them.
class Aliases {
 public:
  // A CPU tensor on the memory of `tensor`, which it keeps alive; of a sparse one, on that of its indices and values.
  // Tensors that are not on the device pass unchanged.
  at::Tensor to_cpu(const at::Tensor& tensor);
  std::vector<at::Tensor> to_cpu(const std::vector<at::Tensor>& tensors);
  // The way back: a view of an argument becomes a view of it on its own device, anything new is taken over by `device`.
  at::Tensor to_device(const at::Tensor& tensor, c10::Device device);
  // Follow the kernel where it reallocated the memory of an argument (an out= that was too small).
  void adopt_reallocated();
  // After a kernel wrote into `alias`: give `tensor` all that it may have got anew beside numbers, as out= arguments do:
  // shape, lazy conjugation and negation, the indices and values of a sparse one.
  void adopt_form(const at::Tensor& tensor, const at::Tensor& alias, const char* method);

 private:
  struct Pair {
    c10::Storage device;
    c10::Storage cpu;
  };
  c10::SmallVector<Pair, 8> pairs_;

  c10::Storage cpu_storage(const c10::Storage& device);
  at::Tensor sparse_to_cpu(const at::Tensor& tensor);
  at::Tensor sparse_to_device(const at::Tensor& tensor, c10::Device device);
};

}  // namespace trlcompat
