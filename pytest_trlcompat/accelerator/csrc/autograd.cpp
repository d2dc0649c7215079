// Autograd of operators that have no formula of their own (collectives, for example): what torch gives other devices.
//
// Up to torch 2.9 a device under a name of its own had none, and such an operator ended in "Could not run
// 'c10d::broadcast_' with arguments from the 'AutogradPrivateUse1' backend".
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1))
    m.fallback(torch::autograd::basicAutogradNotImplementedFallback());
}
