// What is known of an operator once and for all: from its schema, its tags and the dispatcher's
// tables.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <vector>

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
  bool view_only = false;      // returns aliases, writes nothing
  bool makes_unknown = false;  // empty and its kin: a source with unknown content
  bool moves_storage = false;  // set_, t_, squeeze_ ...: changes metadata, writes no content
  bool never_replay = false;   // resize_, collectives: what it writes or returns becomes a source
  bool certain = false;        // aten: replays bit for bit by construction; otherwise audited first
  bool any_write = false;
  int training_argument = -1;   // batch norm: Scratch holds only where this argument is true
  bool may_save_clone = false;  // in-place ops whose autograd saves self.clone() made inside
  size_t n_returns = 0;
  const Shortcut* shortcut = nullptr;  // a cheaper way to run it again on the CPU
  std::vector<Write> writes;           // one per argument

  Write write_of(size_t argument) const {
    return argument < writes.size() ? writes[argument] : Write::No;
  }
};

// The facts of the op that `fn` announces, or nullptr where it is no operator (a user's range, a
// region).
OpInfo* op_info(const at::RecordFunction& fn);
OpInfo* clone_op_info();

// Composite ops and autocast wrappers are transparent: what they call is recorded instead.
bool is_transparent(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, bool on_cpu);

// The numbers among the arguments, mixed into `h`.
uint64_t mix_numbers(uint64_t h, c10::ArrayRef<const c10::IValue> inputs);

inline uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdULL;
  return h ^ (h >> 32);
}

// Sabotage switches, for the tests that prove that the tests can fail.
enum class Sabotage : int {
  None = 0,
  NoRngRestore = 1,
  EmptyAsOp = 2,
  InplaceWithoutCopy = 3,
  WrappedNumberLost = 4,
  PreWriteValue = 5,  // in-place ops are left out at replay
  NoCloneOnWrite = 6,
  WrongShortcut = 7,
  NoOrderOut = 8,    // memory is freed while a side stream may still read it
  NoOrderIn = 9,     // memory is used before a side stream has filled it
  NoOrderSide = 10,  // a side stream does not wait for what compute has queued
};
Sabotage sabotage();
void set_sabotage(Sabotage which);

// Whether host memory that is given back is filled with NaN, for tests of who still reads it.
bool poisons();
void set_poison(bool on);

}  // namespace delta
