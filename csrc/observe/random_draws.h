// What an op draws from random generators, so that it can draw the same numbers again. How it does
// is in rebuild/random_state.h.
//
// Note: random numbers
//  1. The generator is copied before the op draws. When the op runs again it is given a copy of
//     that copy as its generator argument: the program's own generator is neither moved nor read,
//     so no other thread can disturb the numbers or be disturbed.
//  2. Where the op has no such argument, the overload that has it is called. Where there is none,
//     the program's generator is set, used and put back; a draw of another thread in between is
//     found by the state that the op leaves behind, and raises.
//  3. Another thread may draw between the copy and the op itself. The observer counts the draws of
//     other threads; an op during which one was seen is not run again.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace delta {

struct OpInfo;

struct GeneratorState {
  uint64_t words[2] = {0, 0};
  static GeneratorState of(const at::Generator& generator);  // under the generator's lock
  bool operator==(const GeneratorState& other) const {
    return words[0] == other.words[0] && words[1] == other.words[1];
  }
};

struct RecordedDraw {
  at::Generator generator;  // of the program
  at::Generator before;     // a copy of it, as it was before the op
  GeneratorState after;     // where rule 2 needs it, and where it is not known whether the op draws
};

// Copies what the op may draw from. Allocates.
std::vector<RecordedDraw> copy_generators(const OpInfo& info,
                                          c10::ArrayRef<const c10::IValue> inputs,
                                          c10::Device device);

// After the op. Forgets the copies where nothing was drawn.
void note_drawn(const OpInfo& info, std::vector<RecordedDraw>& draws);

// Draws of threads that the recorder does not follow.
class StrangerDraws {
 public:
  struct Mark {
    uint64_t begun = 0;
    bool busy = false;
  };

  void begin(bool from_default) {
    begun_.fetch_add(1);
    if (from_default) {
      from_default_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  void end() { ended_.fetch_add(1); }
  uint64_t from_default() const { return from_default_.load(std::memory_order_relaxed); }
  Mark mark() const {
    const uint64_t ended = ended_.load();
    const uint64_t begun = begun_.load();
    return {begun, begun != ended};
  }
  bool since(const Mark& mark) const { return mark.busy || begun_.load() != mark.begun; }

 private:
  std::atomic<uint64_t> begun_{0};
  std::atomic<uint64_t> ended_{0};
  std::atomic<uint64_t> from_default_{0};
};
StrangerDraws& stranger_draws();

}  // namespace delta
