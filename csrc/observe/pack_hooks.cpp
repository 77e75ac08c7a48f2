#include "observe/pack_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

namespace delta {
namespace {

bool (*g_is_pack_hook)(PyObject* hook) = nullptr;

template <class Pair>
bool is_ours(const Pair& hooks) {
  return g_is_pack_hook != nullptr && g_is_pack_hook(hooks.first.ptr(getPyInterpreter()));
}

}  // namespace

void set_is_pack_hook(bool (*is_pack_hook)(PyObject* hook)) { g_is_pack_hook = is_pack_hook; }

bool has_our_pack_hook() {
  using Hooks = decltype(at::impl::SavedTensorDefaultHooksTLS::stack);
  struct Opened : Hooks {  // a stack shows its top only
    static const container_type& elements(const Hooks& hooks) { return hooks.*(&Opened::c); }
  };
  for (const auto& pair : Opened::elements(at::SavedTensorDefaultHooks::get_tls_state().stack)) {
    if (is_ours(pair)) {
      return true;
    }
  }
  return false;
}

bool has_foreign_pack_hook() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  return !hooks.empty() && !is_ours(hooks.top());
}

}  // namespace delta
