// Seconds of an accelerator's time that waits for lanes and reruns take, step by step.
//
// Note: spans
//  1. A span lies between two events on one stream: around its wait for a copy, or around a rerun.
//     Nobody waits for them. The seconds of a step are known once its last event was reached, which
//     is a step or two later.
//  2. What a rerun waits for lanes counts as waiting alone.
//  3. Where the events cannot be had, or were too many, nothing is said of that step.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace delta {

enum class SpanKind : uint8_t { OutWait, InWait, Rerun };

struct StepSeconds {
  int64_t step = 0;
  double out_wait_s = 0;
  double in_wait_s = 0;
  double rerun_s = 0;
};

class StreamSpans {
 public:
  explicit StreamSpans(c10::Device device) : device_(device) {}

  // One span, from here to the end of its life. What is thrown in it counts, too.
  class Span {
   public:
    Span(StreamSpans& all, SpanKind kind, c10::StreamId stream);
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    StreamSpans& all_;
    const SpanKind kind_;
    const c10::StreamId stream_;
    std::optional<c10::Event> begin_;
  };

  void begin_step(int64_t step);
  void end_step();
  std::vector<StepSeconds> take_known();  // of steps that are over, once; in order

 private:
  struct Recorded {
    SpanKind kind;
    bool in_rerun;
    c10::Event begin;
    c10::Event end;
  };
  struct Step {
    int64_t number = 0;
    bool is_over = false;
    bool is_lost = false;  // nothing can be said of it
    std::vector<Recorded> spans;
  };

  void add(Recorded recorded);
  void lose();
  static bool reached(const Step& step);
  static StepSeconds sum(const Step& step);

  const c10::Device device_;
  std::mutex mutex_;
  std::deque<Step> steps_;
};

}  // namespace delta
