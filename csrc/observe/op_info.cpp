#include "observe/op_info.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "observe/operands.h"
#include "rebuild/shortcuts.h"
#include "util/errors.h"
#include "util/per_thread.h"

namespace delta {
namespace {

// Ops that write running statistics, marked in their schema or not; the outputs do not depend on
// the old statistics while training. Name without overload -> (written arguments, index of
// `training`; -1: always).
struct SideWrites {
  std::vector<size_t> arguments;
  int training_argument;
};
const std::unordered_map<std::string, SideWrites>& side_writes() {
  static const std::unordered_map<std::string, SideWrites> table = {
      {"aten::native_batch_norm", {{3, 4}, 5}},
      {"aten::cudnn_batch_norm", {{3, 4}, 5}},
      {"aten::miopen_batch_norm", {{3, 4}, 5}},
      {"aten::_native_batch_norm_legit", {{3, 4}, 5}},
      {"aten::_batch_norm_with_update", {{3, 4}, -1}},
      {"aten::batch_norm_update_stats", {{1, 2}, -1}},
      {"aten::batch_norm_gather_stats", {{3, 4}, -1}},
      {"aten::batch_norm_gather_stats_with_counts", {{3, 4}, -1}},
  };
  return table;
}

// Ops that write an argument and do not say so in their schema: name without overload -> argument.
// What a recurrent layer's forward left for its backward is that backward's scratch memory.
const std::unordered_map<std::string, std::string>& unlisted_writes() {
  static const std::unordered_map<std::string, std::string> table = {
      {"aten::mkldnn_rnn_layer_backward", "workspace"},
      {"aten::_cudnn_rnn_backward", "reserve"},
      {"aten::miopen_rnn_backward", "reserve"},
  };
  return table;
}

// In-place ops that overwrite all of their first argument.
const std::unordered_set<std::string>& overwriting_ops() {
  static const std::unordered_set<std::string> names = {
      "aten::fill_",       "aten::zero_",      "aten::normal_",      "aten::uniform_",
      "aten::random_",     "aten::bernoulli_", "aten::exponential_", "aten::geometric_",
      "aten::log_normal_", "aten::cauchy_",    "aten::copy_",
  };
  return names;
}

const std::unordered_set<std::string>& empty_ops() {
  static const std::unordered_set<std::string> names = {
      "aten::empty",     "aten::empty_like",        "aten::empty_strided",
      "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted",
  };
  return names;
}

// What they return has a tensor's geometry and dtype, and nothing of its content.
const std::unordered_set<std::string>& like_factories() {
  static const std::unordered_set<std::string> names = {
      "aten::zeros_like", "aten::ones_like",  "aten::full_like",
      "aten::rand_like",  "aten::randn_like", "aten::randint_like",
      "aten::new_zeros",  "aten::new_ones",   "aten::new_full",
  };
  return names;
}

// Ops that are not pointwise and compute no product of matrices all the same.
const std::unordered_set<std::string>& without_products() {
  static const std::unordered_set<std::string> names = {
      "aten::native_layer_norm",
      "aten::native_group_norm",
      "aten::native_batch_norm",
      "aten::_native_batch_norm_legit",
      "aten::native_dropout",
      "aten::_softmax",
      "aten::_log_softmax",
      "aten::nll_loss_forward",
      "aten::embedding",
      "aten::index_select",
      "aten::gather",
      "aten::sum",
      "aten::mean",
      "aten::cat",
      "aten::clone",
      "aten::copy_",
      "aten::_to_copy",
      "aten::max_pool2d_with_indices",
      "aten::avg_pool2d",
      "aten::upsample_nearest2d",
  };
  return names;
}

// Return values that differ between two ordinary runs: a workspace, or memory that is written in
// parts.
int unrepeatable_return(const std::string& name) {
  static const std::unordered_map<std::string, int> returns = {
      {"aten::mkldnn_rnn_layer", 3},
      {"aten::_ctc_loss", 1},
      {"aten::_cudnn_ctc_loss", 1},
  };
  const auto found = returns.find(name);
  return found == returns.end() ? -1 : found->second;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

bool math_kernel(const std::string& table, const char* key) {
  auto begin = table.find(std::string("\n") + key + ": ");
  if (begin == std::string::npos) {
    return false;
  }
  auto end = table.find('\n', begin + 1);
  return table.substr(begin, end - begin).find("[math kernel]") != std::string::npos;
}

bool is_collective(const std::string& name) {
  for (const char* prefix : {"c10d::", "_c10d_functional", "fsdp::", "symm_mem::", "_dtensor::"}) {
    if (starts_with(name, prefix)) {
      return true;
    }
  }
  return false;
}

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) {
    return true;
  }
  const auto inside = type->containedTypes();
  return std::any_of(inside.begin(), inside.end(), holds_tensors);
}

bool is_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  return type->kind() == c10::TypeKind::GeneratorType ||
         (type->kind() == c10::TypeKind::OptionalType &&
          type->containedTypes()[0]->kind() == c10::TypeKind::GeneratorType);
}

// Finds where a random op takes its generator, or the overload that takes one and all else alike.
void find_generator(OpInfo& info) {
  const auto& arguments = info.handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_generator(arguments[i])) {
      info.generator_argument = static_cast<int>(i);
      return;
    }
  }
  for (const auto& overload : c10::Dispatcher::singleton().getAllOpNames()) {
    if (overload.name != info.handle.schema().name()) {
      continue;
    }
    const auto handle = c10::Dispatcher::singleton().findSchema(overload);
    if (!handle.has_value() || handle->schema().arguments().size() != arguments.size() + 1) {
      continue;
    }
    const auto& longer = handle->schema().arguments();
    int place = -1;
    bool alike = true;
    for (size_t i = 0, k = 0; i < longer.size() && alike; ++i) {
      if (place < 0 && is_generator(longer[i])) {
        place = static_cast<int>(i);
        continue;
      }
      alike = k < arguments.size() && longer[i].name() == arguments[k].name() &&
              *longer[i].type() == *arguments[k].type();
      ++k;
    }
    if (alike && place >= 0) {
      info.generator_argument = place;
      info.with_generator = *handle;
      return;
    }
  }
}

// What of the op the dispatcher's tables tell.
void find_kernels(OpInfo& info) {
  // Note: only the computed dispatch table tells composite ops.
  // hasKernelForDispatchKey(CompositeImplicit...) is wrong for native_channel_shuffle,
  // silu_backward and mish_backward, and excluding the ops that have an Autograd-alias kernel is
  // wrong for max_pool2d.
  const std::string table = info.handle.dumpComputedTable();
  info.composite_cpu = math_kernel(table, "AutogradCPU");
  info.composite_accelerator = math_kernel(table, "AutogradCUDA");
  for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::SparseCPU,
                   c10::DispatchKey::SparseCsrCPU}) {
    info.has_backend_kernel |= info.handle.hasComputedKernelForDispatchKey(key);
  }
  for (auto key : c10::autocast_dispatch_keyset) {
    if (info.handle.hasKernelForDispatchKey(key)) {
      info.has_autocast_kernel = true;
      info.autocast_keys = info.autocast_keys.add(key);
    }
  }
}

// How it writes each of its arguments, as far as that depends on no tensor.
void find_writes(OpInfo& info, const std::string& name) {
  const auto& schema = info.handle.schema();
  info.writes.resize(schema.arguments().size(), Write::No);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      info.writes[i] = schema.arguments()[i].is_out() ? Write::Overwrite : Write::InPlace;
    }
  }
  if (overwriting_ops().count(name) && !info.writes.empty() && info.writes[0] != Write::No) {
    info.writes[0] = Write::Overwrite;
  }
  auto unlisted = unlisted_writes().find(name);
  if (unlisted != unlisted_writes().end()) {
    const auto i = schema.argumentIndexWithName(unlisted->second);
    if (i) {
      info.writes[*i] = Write::InPlace;
    }
  }
  auto side = side_writes().find(name);
  if (side != side_writes().end()) {
    for (size_t i : side->second.arguments) {
      info.writes[i] = Write::Scratch;
    }
    info.training_argument = side->second.training_argument;
  }
}

// Collectives: their schemas say nothing of what they write.
void find_collective_writes(OpInfo& info, const std::string& name) {
  const auto& arguments = info.handle.schema().arguments();
  if (!info.collective || !starts_with(name, "c10d::")) {
    return;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (info.writes[i] == Write::No && holds_tensors(arguments[i].type())) {
      info.writes[i] = Write::InPlace;
      info.any_write = true;
      info.view_only = false;
    }
  }
}

std::unique_ptr<OpInfo> make_info(const c10::OperatorHandle& handle) {
  auto info = std::make_unique<OpInfo>(handle);
  const auto& schema = handle.schema();
  const std::string& name = schema.name();
  info->name = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
  info->name_hash = hash_of_name(info->name);
  info->n_returns = schema.returns().size();

  find_kernels(*info);
  bool inplace_view = false;
  bool pointwise = false;
  for (auto tag : handle.getTags()) {
    info->random |= tag == at::Tag::nondeterministic_seeded;
    inplace_view |= tag == at::Tag::inplace_view;
    pointwise |= tag == at::Tag::pointwise;
  }
  find_writes(*info, name);
  bool returns_alias = false;
  for (const auto& r : schema.returns()) {
    returns_alias |= r.alias_info() != nullptr;
  }
  for (auto w : info->writes) {
    info->any_write |= w != Write::No;
  }
  info->view_only = !info->any_write && returns_alias;
  info->makes_unknown = empty_ops().count(name) > 0;
  const bool resizes = starts_with(name, "aten::resize");
  info->moves_storage =
      name == "aten::set_" || name == "aten::set_data" || (inplace_view && !resizes);
  info->collective = is_collective(name);
  info->never_replay = name == "aten::resize_" || name == "aten::resize_as_" || info->collective;
  find_collective_writes(*info, name);
  const bool reads_tensors =
      std::any_of(schema.arguments().begin(), schema.arguments().end(),
                  [](const auto& argument) { return holds_tensors(argument.type()); });
  info->certain = starts_with(name, "aten::");
  info->multiplies = !info->certain || !(pointwise || without_products().count(name) > 0);
  info->factory = info->certain && !info->any_write && !info->makes_unknown && !returns_alias &&
                  (!reads_tensors || like_factories().count(name) > 0);
  info->unrepeatable_return = unrepeatable_return(name);
  // Only of factories: elsewhere it may say what to compute in rather than what comes out.
  info->dtype_argument = info->factory && info->n_returns == 1
                             ? schema.argumentIndexWithName("dtype").value_or(-1)
                             : -1;
  if (info->random) {
    find_generator(*info);
  }
  info->flops = find_flops(name);
  info->reads_a_part = reads_a_part(name);
  info->shortcut = find_shortcut(info->name);
  info->may_save_clone = !name.empty() && name.back() == '_' && !info->writes.empty() &&
                         info->writes[0] != Write::No && name != "aten::set_";
  return info;
}

bool functorch_active() {
  auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ - local.excluded_).has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Note: autocast keys are in every tensor's key set and *excluded* in thread-local state by
// default; enabling autocast takes the exclusion away. An op is an autocast wrapper exactly when
// one of its arguments carries a key that is not excluded and for which this op has a kernel.
bool autocast_applies(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  auto local = c10::impl::tls_local_dispatch_key_set();
  auto active = (c10::autocast_dispatch_keyset - local.excluded_) & info.autocast_keys;
  if (active.empty()) {
    return false;
  }
  c10::DispatchKeySet keys;
  for (const auto& x : inputs) {
    if (x.isTensor()) {
      if (x.toTensor().defined()) {
        keys = keys | x.toTensor().key_set();
      }
    } else if (x.isTensorList()) {
      for (const at::Tensor& t : x.toTensorList()) {
        keys = keys | t.key_set();
      }
    } else if (x.isOptionalTensorList()) {
      for (const auto& t : x.toOptionalTensorVector()) {
        if (t.has_value()) {
          keys = keys | t->key_set();
        }
      }
    }
  }
  return keys.has_any(active);
}

}  // namespace

OpInfo* clone_op_info() {
  static OpInfo* info =
      make_info(*c10::Dispatcher::singleton().findSchema({"aten::clone", ""})).release();
  return info;
}

namespace {

// The facts of all ops that were met, by their schemas' name pointers. A library that defines its
// op anew (a cell of a notebook that is run again) gets the same pointer for another op.
class OpTable final {
 public:
  std::atomic<uint64_t> removals{0};

  static OpTable& instance() {
    static auto* table = new OpTable();  // outlives the libraries, which end when the process does
    return *table;
  }

  void forget_lock() { new (&mutex_) std::mutex(); }

  OpInfo* find_or_make(const void* key, const c10::OperatorHandle& handle) {
    for (;;) {
      const uint64_t before = removals.load();
      if (OpInfo* known = find(key)) {
        return known;
      }
      auto made = make_info(handle);  // without the mutex: it asks the dispatcher
      std::lock_guard<std::mutex> guard(mutex_);
      if (before != removals.load()) {
        continue;
      }
      const auto redefined = redefined_.find(made->name);
      if (redefined != redefined_.end()) {  // nothing that is known of its namesake holds for it
        made->name_hash = mix(made->name_hash, redefined->second);
      }
      const auto [place, is_new] = infos_.emplace(key, std::move(made));
      OpInfo* info = place->second.get();
      if (is_new && info->with_generator.has_value()) {
        overloads_.push_back({info->with_generator->schema().name().c_str(), key});
      }
      return info;
    }
  }

 private:
  // An op that is called instead of another one.
  struct Overload {
    const void* key;
    const void* of;
  };

  // The dispatcher tells of what is defined no more, under its own mutex.
  class Listener final : public c10::OpRegistrationListener {
   public:
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      instance().remove(op.schema().name().c_str());
    }
  };

  OpTable() {
    // It is never taken back.
    static auto* listening = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
    (void)listening;
  }

  OpInfo* find(const void* key) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto it = infos_.find(key);
    return it == infos_.end() ? nullptr : it->second.get();
  }

  void remove(const void* key) {
    std::lock_guard<std::mutex> guard(mutex_);
    removals.fetch_add(1);
    retire(key);
    const auto names_it = [&](const Overload& each) { return each.key == key; };
    for (const auto& each : overloads_) {
      if (names_it(each)) {
        retire(each.of);
      }
    }
    overloads_.erase(std::remove_if(overloads_.begin(), overloads_.end(), names_it),
                     overloads_.end());
  }

  void retire(const void* key) {
    const auto it = infos_.find(key);
    if (it == infos_.end()) {
      return;
    }
    it->second->is_gone.store(true);
    ++redefined_[it->second->name];
    gone_.push_back(std::move(it->second));
    infos_.erase(it);
  }

  std::mutex mutex_;
  ska::flat_hash_map<const void*, std::unique_ptr<OpInfo>> infos_;
  std::vector<std::unique_ptr<OpInfo>> gone_;  // records may name them
  std::unordered_map<std::string, uint64_t> redefined_;
  std::vector<Overload> overloads_;
};

// The facts of the op whose schema's name lies at `key`; nullptr where there is no such op. Misses
// are not cached: another kind of range may reuse the address.
template <class Find>
OpInfo* latest_or(const void* key, const Find& find) {
  static OpTable& table = OpTable::instance();
  // In front of it: each thread's latest op by some bits of the pointer.
  constexpr size_t kSlots = 1024;
  struct Known {
    const void* key = nullptr;
    OpInfo* info = nullptr;
  };
  struct Latest {
    Known slots[kSlots];
  };
  const auto bits = reinterpret_cast<uintptr_t>(key);
  Known& latest = per_thread<Latest>().slots[((bits >> 4) ^ (bits >> 14)) % kSlots];
  if (latest.key == key && !latest.info->is_gone.load(std::memory_order_relaxed)) {
    return latest.info;
  }
  const std::optional<c10::OperatorHandle> handle = find();
  if (!handle.has_value()) {
    return nullptr;
  }
  latest = {key, table.find_or_make(key, *handle)};
  return latest.info;
}

}  // namespace

OpInfo* op_info(const at::RecordFunction& fn) {
  return latest_or(fn.name(), [&]() -> std::optional<c10::OperatorHandle> {
    const auto name = fn.operator_name();
    return name.has_value() ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  });
}

OpInfo* op_info(const c10::OperatorHandle& op) {
  return latest_or(op.schema().name().c_str(), [&] { return std::optional(op); });
}

uint64_t op_removals() { return OpTable::instance().removals.load(); }

void forget_op_table_lock() { OpTable::instance().forget_lock(); }

void check_is_defined(const OpInfo& info) {
  if (info.is_gone.load()) {
    throw RecomputeMismatchError(
        "delta_runtime: the op " + info.name +
        " was defined anew, or is not defined any more, since it ran in forward, so that what it "
        "made "
        "cannot be recomputed. Define ops outside of the step, or leave the step out with "
        "delta_runtime.disable(). Gradients of this backward are incomplete; weights and optimizer "
        "state are as they were.");
  }
}

uint64_t mix_numbers(uint64_t h, c10::ArrayRef<const c10::IValue> inputs) {
  for (const auto& x : inputs) {
    if (x.isInt()) {
      h = mix(h, static_cast<uint64_t>(x.toInt()));
    } else if (x.isBool()) {
      h = mix(h, x.toBool() ? 3 : 5);
    } else if (x.isDouble()) {
      const double number = x.toDouble();
      uint64_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      h = mix(h, bits);
    }
  }
  return h;
}

OpWork work_of(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  OpWork work;
  bool floats = false;
  bool first = true;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      if (!t.defined()) {
        return;
      }
      if (work.dtype < 0 || (!floats && t.is_floating_point())) {
        work.dtype = static_cast<int32_t>(t.scalar_type());
        floats = t.is_floating_point();
      }
      const bool unread = info.factory || info.makes_unknown || (first && info.reads_a_part);
      work.moved_bytes += unread ? 0 : touched_bytes(t);
      first = false;
    });
  }
  if (info.flops != nullptr) {
    try {
      const double flops = info.flops(inputs);
      work.flops = std::isfinite(flops) ? flops : 0;
    } catch (
        const std::exception&) {  // arguments of an unusual kind: a count must not cost a record
      work.flops = 0;
    }
  }
  return work;
}

bool is_transparent(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, bool on_cpu) {
  if (on_cpu ? info.composite_cpu : info.composite_accelerator) {
    return true;
  }
  if (info.has_autocast_kernel && autocast_applies(info, inputs)) {
    return true;
  }
  return functorch_active();
}

}  // namespace delta
