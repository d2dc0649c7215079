// The Python module: what the stand-in package torch_npu calls.
#include "accelerator.h"
#include "collectives.h"
#include "notes.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using torch::wrap_pybind_function;

int device_count() { return trlcompat::device_count(); }
int current_device() { return trlcompat::current_device(); }
void set_device(int index) { trlcompat::set_current_device(trlcompat::existing(index)); }
int64_t current_stream(int index) { return trlcompat::current_stream(trlcompat::existing(index)).id(); }
void set_stream(int index, int64_t id) {
  const c10::Device device(trlcompat::kDevice, trlcompat::existing(index));
  trlcompat::exchange_current_stream(c10::Stream(c10::Stream::UNSAFE, device, id));
}
at::Generator default_generator(int index) { return trlcompat::default_generator(trlcompat::existing(index)); }
int64_t memory_allocated(int index) { return trlcompat::memory_counts(trlcompat::existing(index)).current; }
int64_t max_memory_allocated(int index) { return trlcompat::memory_counts(trlcompat::existing(index)).peak; }
void reset_peak_memory_stats(int index) { trlcompat::reset_peak_memory(trlcompat::existing(index)); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", wrap_pybind_function(trlcompat::register_hooks));
  m.def("device_count", wrap_pybind_function(device_count));
  m.def("show_devices", wrap_pybind_function(trlcompat::show_devices));
  m.def("current_device", wrap_pybind_function(current_device));
  m.def("set_device", wrap_pybind_function(set_device));
  m.def("current_stream", wrap_pybind_function(current_stream));
  m.def("set_stream", wrap_pybind_function(set_stream));
  m.def("default_generator", wrap_pybind_function(default_generator));
  m.def("memory_allocated", wrap_pybind_function(memory_allocated));
  m.def("max_memory_allocated", wrap_pybind_function(max_memory_allocated));
  m.def("reset_peak_memory_stats", wrap_pybind_function(reset_peak_memory_stats));
  m.def("notes_bytes", wrap_pybind_function(trlcompat::Notes::bytes));
  m.def("new_backend", wrap_pybind_function(trlcompat::new_backend));
}
