#include "dry_run/dry_run.h"

#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "observe/operands.h"

namespace delta {
namespace dry_run {
namespace {

using c10::DispatchKey;
using c10::IValue;

// More than that an op does not compute with, nor make, even where all of it is known: of numbers
// that a model is made of, and of those that say which (ids, positions, masks).
constexpr int64_t kMostFloatBytes = 4096;
constexpr int64_t kMostOtherBytes = 1 << 20;

bool is_small(int64_t bytes, at::ScalarType dtype) {
  const bool floats = at::isFloatingType(dtype) || at::isComplexType(dtype);
  return bytes <= (floats ? kMostFloatBytes : kMostOtherBytes);
}

// What these do depends on shapes alone: they do it.
const std::unordered_set<std::string>& by_shape_alone() {
  static const std::unordered_set<std::string> names{
      "aten::empty",
      "aten::empty_strided",
      "aten::empty_like",
      "aten::new_empty",
      "aten::set_",
      "aten::resize_",
      "aten::resize_as_",
      "aten::set_data",
      "aten::new_empty_strided",
      "aten::is_set_to",
      "aten::_fused_sdp_choice",
  };
  return names;
}

enum class Way { Composite, Real, Asked };

Way find_way(const c10::OperatorHandle& op) {
  if (by_shape_alone().count(op.schema().name()) > 0) {
    return Way::Real;
  }
  bool writes = false;
  for (const auto& argument : op.schema().arguments()) {
    writes |= argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }
  bool aliases = false;
  for (const auto& returned : op.schema().returns()) {
    aliases |= returned.alias_info() != nullptr;
  }
  const auto tags = op.getTags();
  const bool changes_view =
      std::find(tags.begin(), tags.end(), at::Tag::inplace_view) != tags.end();
  if ((aliases && !writes) || changes_view) {
    return Way::Real;
  }
  // Kernels that are composite for a backend alone may compute by themselves: copy_, convolution.
  // This one allocates much on the way.
  const bool composite = (!op.hasKernelForDispatchKey(DispatchKey::CPU) &&
                          op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) ||
                         op.schema().name() == "aten::_trilinear";
  return composite ? Way::Composite : Way::Asked;
}

// Storages whose content was never made. Weak owners keep their addresses from being used again.
class Unknown {
 public:
  void add(const c10::Storage& storage) {
    std::lock_guard<std::mutex> guard(mutex_);
    sweep();
    auto* impl = storage.unsafeGetStorageImpl();
    storages_.emplace(impl, storage.getWeakStorageImpl());
  }
  void clear() {
    std::lock_guard<std::mutex> guard(mutex_);
    storages_.clear();
    left_ = 0;
  }
  bool has(const c10::Storage& storage) {
    std::lock_guard<std::mutex> guard(mutex_);
    return storages_.find(storage.unsafeGetStorageImpl()) != storages_.end();
  }

 private:
  void sweep() {
    if (storages_.size() < 2 * left_ + 1024) {
      return;
    }
    for (auto it = storages_.begin(); it != storages_.end();) {
      it = it->second.expired() ? storages_.erase(it) : std::next(it);
    }
    left_ = storages_.size();
  }

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  size_t left_ = 0;
};
Unknown& unknown() {
  static auto* storages = new Unknown();  // outlives all that may still ask when the program ends
  return *storages;
}

// Tensors of the program that ops computed into, as they were before: they get that back.
struct Original {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string content;
};

std::mutex g_mutex;
std::vector<Ask> g_asks;
std::vector<Original> g_originals;
std::unordered_map<std::string, Way> g_ways;

Way way_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  const std::string key = name.name + "." + name.overload_name;
  std::lock_guard<std::mutex> guard(g_mutex);
  const auto known = g_ways.find(key);
  return known != g_ways.end() ? known->second : g_ways.emplace(key, find_way(op)).first->second;
}

Ask current_ask() {
  std::lock_guard<std::mutex> guard(g_mutex);
  TORCH_CHECK(!g_asks.empty(), "delta_runtime: an op of a dry run that has ended");
  return g_asks.back();
}

// The tensors of the arguments, each once, in order.
std::vector<at::Tensor> tensors_of(c10::ArrayRef<const IValue> arguments) {
  std::vector<at::Tensor> tensors;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& t, int) {
      const auto same = [&](const at::Tensor& other) { return other.is_same(t); };
      if (t.defined() && std::none_of(tensors.begin(), tensors.end(), same)) {
        tensors.push_back(t);
      }
    });
  }
  return tensors;
}

bool are_known_and_small(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
    return is_known(t) && is_small(t.numel() * static_cast<int64_t>(t.itemsize()), t.scalar_type());
  });
}

// Whether the storages that it writes to are small as a whole: they are kept meanwhile.
bool writes_small(const c10::OperatorHandle& op, c10::ArrayRef<const IValue> arguments) {
  bool small = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for_each_tensor(arguments[i], [&](const at::Tensor& t, int) {
        small &= !t.defined() || !t.has_storage() ||
                 is_small(static_cast<int64_t>(t.storage().nbytes()), t.scalar_type());
      });
    }
  }
  return small;
}

bool makes_small(const Answer& answer) {
  for (const auto& of_one : answer.returns) {
    for (const auto& each : of_one) {
      if (const auto* made = std::get_if<NewTensor>(&each)) {
        int64_t n = 1;
        for (const int64_t size : made->sizes) {
          n *= size;
        }
        if (!is_small(n * static_cast<int64_t>(c10::elementSize(made->dtype)), made->dtype)) {
          return false;
        }
      }
    }
  }
  return true;
}

struct Make {
  const std::vector<at::Tensor>& tensors;

  at::Tensor operator()(const NewTensor& made) const {
    auto t = at::empty_strided(made.sizes, made.strides, at::dtype(made.dtype).device(at::kCPU));
    unknown().add(t.storage());
    return t;
  }
  at::Tensor operator()(const ViewOf& view) const {
    const auto& of = tensors.at(view.argument);
    return at::as_strided(of, view.sizes, view.strides, of.storage_offset() + view.offset);
  }
  at::Tensor operator()(const Argument& argument) const { return tensors.at(argument.number); }
  at::Tensor operator()(const Nothing&) const { return {}; }
};

// A number that was given where a tensor is asked for: what comes of it has another dtype.
bool is_number(const IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined() &&
         argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Tensors without memory, in place of those of the op.
torch::jit::Stack without_memory(c10::ArrayRef<const IValue> arguments,
                                 const std::vector<at::Tensor>& tensors,
                                 std::vector<at::Tensor>& bare) {
  for (const auto& t : tensors) {
    bare.push_back(t.layout() == at::kStrided && !t.is_quantized()
                       ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta))
                       : t);
  }
  const auto bare_of = [&](const at::Tensor& t) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].is_same(t)) {
        return bare[i];
      }
    }
    return at::Tensor();
  };
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    if (is_number(argument)) {
      stack.emplace_back(argument.toTensor().item());
    } else if (argument.isTensor()) {
      stack.emplace_back(bare_of(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : argument.toTensorVector()) {
        list.push_back(bare_of(t));
      }
      stack.emplace_back(std::move(list));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : argument.toOptionalTensorVector()) {
        list.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(bare_of(*t))
                                                     : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(argument);
    }
  }
  return stack;
}

// Whether it was made by somebody else's imitation, or has no content anyway: none of ours.
bool is_of_others(c10::ArrayRef<const IValue> arguments) {
  bool found = false;
  for (const auto& argument : arguments) {
    found |= argument.isDevice() && argument.toDevice().is_meta();
    for_each_tensor(argument, [&](const at::Tensor& t, int) {
      found |= t.defined() && (t.is_meta() || t.key_set().has(DispatchKey::Python));
    });
  }
  return found;
}

void keep_originals(const c10::OperatorHandle& op, c10::ArrayRef<const IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    for_each_tensor(arguments[i], [&](const at::Tensor& t, int) {
      if (!t.defined() || !t.has_storage() || t.storage().data() == nullptr) {
        return;
      }
      std::lock_guard<std::mutex> guard(g_mutex);
      auto* impl = t.storage().unsafeGetStorageImpl();
      const bool kept = std::any_of(
          g_originals.begin(), g_originals.end(),
          [&](const Original& each) { return each.storage._unsafe_get_target() == impl; });
      if (!kept) {
        g_originals.push_back(
            {t.storage().getWeakStorageImpl(),
             std::string(static_cast<const char*>(t.storage().data()), t.storage().nbytes())});
      }
    });
  }
}

void give_originals_back() {
  for (const auto& each : g_originals) {
    if (auto storage = each.storage.lock()) {
      std::memcpy(storage->mutable_data(), each.content.data(),
                  std::min(each.content.size(), storage->nbytes()));
    }
  }
  g_originals.clear();
}

void note_written(const c10::OperatorHandle& op, c10::ArrayRef<const IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for_each_tensor(arguments[i], [&](const at::Tensor& t, int) {
        if (t.defined() && t.has_storage()) {
          unknown().add(t.storage());
        }
      });
    }
  }
}

void push_returns(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Answer& answer,
                  const std::vector<at::Tensor>& tensors) {
  const auto& returns = op.schema().returns();
  TORCH_CHECK(answer.returns.size() == returns.size(), "delta_runtime: ", op.schema().name(),
              " returned ", answer.returns.size(), " things, not ", returns.size());
  const Make make{tensors};
  for (size_t i = 0; i < returns.size(); ++i) {
    if (answer.plain[i].has_value()) {
      stack->push_back(*answer.plain[i]);
    } else if (returns[i].type()->kind() == c10::TypeKind::ListType) {
      c10::List<at::Tensor> list;
      for (const auto& each : answer.returns[i]) {
        list.push_back(std::visit(make, each));
      }
      stack->emplace_back(std::move(list));
    } else {
      stack->emplace_back(std::visit(make, answer.returns[i].at(0)));
    }
  }
}

// Keys for asking somebody in Python: what lies above stays above, and Python is heard even where
// the runtime's own ops keep it out.
c10::impl::LocalDispatchKeySet keys_for_asking() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = keys.included_.remove(DispatchKey::Fake);
  keys.excluded_ = (keys.excluded_ - c10::python_ks) | c10::autocast_dispatch_keyset |
                   c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return keys;
}

void ask_and_push(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, n);
  const auto tensors = tensors_of(arguments);
  std::vector<at::Tensor> bare;
  const auto given = without_memory(arguments, tensors, bare);
  const bool known = are_known_and_small(tensors) && writes_small(op, arguments);
  const auto answer = [&] {
    c10::impl::ForceDispatchKeyGuard python(keys_for_asking());
    const bool numbers = std::any_of(arguments.begin(), arguments.end(), is_number);
    return current_ask()(op, given, bare, known, numbers);
  }();
  if (!answer.has_value() || (known && makes_small(*answer))) {
    keep_originals(op, arguments);
    op.redispatchBoxed(keys, stack);
    return;
  }
  for (const auto& resized : answer->resized) {
    tensors.at(resized.argument).resize_(resized.sizes);
  }
  note_written(op, arguments);
  torch::jit::drop(*stack, n);
  push_returns(op, stack, *answer, tensors);
}

void dry(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, DispatchKey::Fake);
  const Way way = way_of(op);
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (way == Way::Composite || is_of_others(arguments)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard real(DispatchKey::Fake);
  if (way == Way::Real) {
    op.redispatchBoxed(below, stack);
    return;
  }
  ask_and_push(op, below, stack);
}

}  // namespace

bool is_known(const at::Tensor& t) { return !t.has_storage() || !unknown().has(t.storage()); }

void enter(Ask ask) {
  {
    std::lock_guard<std::mutex> guard(g_mutex);
    g_asks.push_back(std::move(ask));
  }
  c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, true);
}

void leave() {
  bool last = true;
  {
    std::lock_guard<std::mutex> guard(g_mutex);
    g_asks.pop_back();
    last = g_asks.empty();
    if (last) {
      give_originals_back();
    }
  }
  if (last) {
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, false);
    unknown().clear();  // what the program had before is as it was
  }
}

bool is_entered() { return c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake); }

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&dry>()); }

}  // namespace dry_run
}  // namespace delta
