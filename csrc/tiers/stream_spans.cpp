#include "tiers/stream_spans.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "util/per_thread.h"

namespace delta {
namespace {

constexpr size_t kMostSpans = 1 << 14;  // of a step
constexpr size_t kMostSteps = 16;       // that are not known yet

struct Reruns {
  int open = 0;  // on this thread
};

}  // namespace

StreamSpans::Span::Span(StreamSpans& all, SpanKind kind, c10::StreamId stream)
    : all_(all), kind_(kind), stream_(stream) {
  per_thread<Reruns>().open += kind == SpanKind::Rerun ? 1 : 0;
  if (all.device_.is_cpu()) {
    return;
  }
  try {
    begin_.emplace(all.device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    begin_->record(c10::Stream(c10::Stream::UNSAFE, all.device_, stream));
  } catch (const std::exception&) {
    begin_.reset();
    all.lose();
  }
}

StreamSpans::Span::~Span() {
  const bool in_rerun = per_thread<Reruns>().open > 0;
  per_thread<Reruns>().open -= kind_ == SpanKind::Rerun ? 1 : 0;
  if (!begin_) {
    return;
  }
  try {
    c10::Event end(all_.device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    end.record(c10::Stream(c10::Stream::UNSAFE, all_.device_, stream_));
    all_.add({kind_, in_rerun, std::move(*begin_), std::move(end)});
  } catch (const std::exception&) {
    all_.lose();
  }
}

void StreamSpans::begin_step(int64_t step) {
  end_step();
  std::lock_guard<std::mutex> guard(mutex_);
  if (steps_.size() >= kMostSteps) {  // nobody asks
    steps_.pop_front();
  }
  steps_.emplace_back();
  steps_.back().number = step;
}

void StreamSpans::end_step() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!steps_.empty()) {
    steps_.back().is_over = true;
  }
}

void StreamSpans::add(Recorded recorded) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (steps_.empty() || steps_.back().is_over) {
    return;
  }
  Step& step = steps_.back();
  step.is_lost |= step.spans.size() >= kMostSpans;
  if (!step.is_lost) {
    step.spans.push_back(std::move(recorded));
  }
}

void StreamSpans::lose() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!steps_.empty()) {
    steps_.back().is_lost = true;
  }
}

bool StreamSpans::reached(const Step& step) {
  return std::all_of(step.spans.begin(), step.spans.end(),
                     [](const Recorded& each) { return each.end.query(); });
}

StepSeconds StreamSpans::sum(const Step& step) {
  StepSeconds all;
  all.step = step.number;
  for (const auto& each : step.spans) {
    const double seconds = each.begin.elapsedTime(each.end) / 1e3;
    if (each.kind == SpanKind::Rerun) {
      all.rerun_s += seconds;
      continue;
    }
    (each.kind == SpanKind::OutWait ? all.out_wait_s : all.in_wait_s) += seconds;
    all.rerun_s -= each.in_rerun ? seconds : 0;
  }
  all.rerun_s = std::max(0.0, all.rerun_s);
  return all;
}

std::vector<StepSeconds> StreamSpans::take_known() {
  std::vector<StepSeconds> known;
  std::lock_guard<std::mutex> guard(mutex_);
  while (!steps_.empty() && steps_.front().is_over) {
    Step& step = steps_.front();
    try {
      if (!step.is_lost && !reached(step)) {
        break;
      }
      if (!step.is_lost) {
        known.push_back(sum(step));
      }
    } catch (const std::exception&) {
      // A device that is lost, or whose events have no clock.
    }
    steps_.pop_front();
  }
  return known;
}

}  // namespace delta
