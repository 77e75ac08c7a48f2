// What is known of an operator once and for all: from its schema, its tags and the dispatcher's
// tables.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "observe/op_work.h"
#include "util/hash.h"
#include "util/sabotage.h"

namespace delta {

struct Shortcut;

// How an op writes one of its arguments.
enum class Write : uint8_t {
  No = 0,
  InPlace = 1,    // the old content matters
  Overwrite = 2,  // the old content does not matter, only the geometry
  Scratch =
      3,  // written on the side (running statistics): replayed on a throw-away buffer of zeros
};

struct OpInfo {
  explicit OpInfo(c10::OperatorHandle h) : handle(std::move(h)) {}

  c10::OperatorHandle handle;
  std::string name;        // with the overload
  uint64_t name_hash = 0;  // stable between processes
  bool composite_cpu = false;
  bool composite_accelerator = false;
  bool has_backend_kernel = false;
  bool random = false;
  bool has_autocast_kernel = false;
  c10::DispatchKeySet autocast_keys;
  bool view_only = false;   // returns aliases, writes nothing
  bool factory = false;     // its results depend on no tensor's content: zeros, rand, ones_like ...
  bool collective = false;  // other processes take part: never run again, not even to compare
  bool makes_unknown = false;  // empty and its kin: a source with unknown content
  bool moves_storage = false;  // set_, t_, squeeze_ ...: changes metadata, writes no content
  bool never_replay = false;   // resize_, collectives: what it writes or returns becomes a source
  bool multiplies = true;      // it may depend on how float32 products are computed
  bool certain = false;        // aten: replays bit for bit by construction; otherwise audited first
  bool any_write = false;
  int generator_argument =
      -1;  // where its generator goes, or goes in `with_generator`; -1: nowhere
  std::optional<c10::OperatorHandle>
      with_generator;            // the overload that takes one, where this does not
  int dtype_argument = -1;       // of a factory: where it takes the dtype of its result
  int unrepeatable_return = -1;  // differs between ordinary runs: a workspace; -1: none does
  int training_argument = -1;    // batch norm: Scratch holds only where this argument is true
  bool may_save_clone = false;   // in-place ops whose autograd saves self.clone() made inside
  size_t n_returns = 0;
  CountFlops flops = nullptr;          // null: it is no product
  bool reads_a_part = false;           // of its first tensor: rows of a table
  const Shortcut* shortcut = nullptr;  // a cheaper way to run it again on the CPU
  std::vector<Write> writes;           // one per argument
  std::atomic<bool> is_gone{false};    // it is not defined any more: its handles lead nowhere

  bool takes_generator() const { return generator_argument >= 0; }

  Write write_of(size_t argument) const {
    return argument < writes.size() ? writes[argument] : Write::No;
  }
};

// The facts of the op that `fn` announces, or nullptr where it is no operator (a user's range, a
// region).
OpInfo* op_info(const at::RecordFunction& fn);
OpInfo* op_info(const c10::OperatorHandle& op);
uint64_t op_removals();       // how often an op was found to be defined no more
void forget_op_table_lock();  // in a forked child
OpInfo* clone_op_info();
void check_is_defined(
    const OpInfo& info);  // before its handles are used: throws RecomputeMismatchError

// What is known of an op's work before it runs: what it writes is not counted.
OpWork work_of(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);

// Composite ops and autocast wrappers are transparent: what they call is recorded instead.
bool is_transparent(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, bool on_cpu);

// The numbers among the arguments, mixed into `h`.
uint64_t mix_numbers(uint64_t h, c10::ArrayRef<const c10::IValue> inputs);

}  // namespace delta
