// The rows of the step graph that is being logged: ops, what they read and make, and what nothing
// could be evicted from.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <vector>

#include "state/session_state.h"

namespace delta {

struct OpenOp;

// Under the session's lock, but for `begin` and what reads.
class StepLog : public Part {
 public:
  explicit StepLog(SessionState& state) : Part(state) {}

  bool logging() const { return logging_; }
  void set_logging(bool on) { logging_ = on; }
  void begin_step();

  void begin(OpenOp& open, c10::ArrayRef<const c10::IValue> inputs);
  void end(OpenOp& open, c10::ArrayRef<const c10::IValue> outputs, double seconds,
           int64_t watermark_bytes);
  void note_made(const Value& value, bool repeats);  // by the op that is open
  void end_outputs(const OpenOp& open);
  // Of an op that nobody announced; what it made.
  void note_clone(const OpenOp& open, const OpRecord& clone, const Value& made);
  void note_name(const OpInfo& info) { names_.emplace(info.name_hash, &info); }

  // What no eviction can lessen: what the op needs beside all that is managed and that it does not
  // read. Copies that only some ways of evicting make are left out, so that no other way needs
  // less.
  void note_stuck(const OpenOp& open, int64_t watermark_bytes);
  // Says of pages that were saved while somebody held their storage, when the last one let go.
  void note_held(const Page& page);
  void note_alone();

  const std::vector<LoggedOp>& ops() const { return ops_; }
  const std::vector<int64_t>& inputs() const { return inputs_; }
  const std::vector<LoggedValue>& outputs() const { return outputs_; }
  const ska::flat_hash_map<uint64_t, const OpInfo*>& names() const { return names_; }

 private:
  LoggedOp new_row(const OpInfo& info);
  void add_inputs(LoggedOp& row, const OpRecord& record);
  LoggedOp* row_of(const OpenOp& open);
  bool may_have_backward() const;
  void forget();

  bool logging_ = false;
  std::vector<LoggedOp> ops_;
  std::vector<int64_t> inputs_;
  std::vector<LoggedValue> outputs_;
  ska::flat_hash_map<uint64_t, const OpInfo*> names_;
  std::vector<int64_t> held_;  // pages saved in a logged step while somebody held them, by id
};

}  // namespace delta
