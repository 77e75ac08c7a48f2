// How far a session and its step have come.
#pragma once

#include <cstdint>

#include "state/values.h"
#include "walk/row.h"

namespace delta {

struct Progress : Moment {
  int64_t step = 0;

  // Of the step.
  int64_t next_key = 0;
  uint64_t fingerprint = 0;  // so far
  uint64_t saves = 0;        // what was saved since that was made
  uint64_t sequence = 0;     // as the fingerprint, but of the ops' names alone
  uint64_t place = 0;        // the same of all ops, backward's included
  bool graph_gone = false;   // a backward let its graph go: the step is over behind it
  int32_t backwards = 0;     // that kept theirs
  int64_t packs_before = 0;  // of the session
  int64_t unpacks_before = 0;
  int64_t cloned_bytes = 0;  // of sources that were copied before they were written
  bool hopeless = false;     // even a rebuild from scratch had to pass the budget
  bool was_tight = false;    // room was made for an op

  // Position in this step's order of produced values; -1: no op of this step made it. Values of an
  // earlier step have keys of that step, which are those of other values now.
  int64_t key_of(const Value& v) const { return v.step == step ? v.key : -1; }

  void begin_step(int64_t packs, int64_t unpacks) {
    const Progress before = *this;
    *this = Progress();
    tick = begin_tick = before.tick;
    step = before.step + 1;
    frontier = before.frontier;
    packs_before = packs;
    unpacks_before = unpacks;
  }
};

}  // namespace delta
