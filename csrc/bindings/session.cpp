#include "bindings/session.h"

#include <algorithm>
#include <iterator>

#include "bindings/callbacks.h"
#include "bindings/direct_hooks.h"
#include "bindings/ticket.h"
#include "state/session.h"
#include "util/plain_frames.h"

namespace delta {
namespace {

template <class T>
py::bytes rows_of(const std::vector<T>& rows) {
  return py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(T));
}

template <class T>
std::vector<T> rows_from(const py::buffer& buffer) {
  auto info = buffer.request();
  constexpr auto kSize = static_cast<py::ssize_t>(sizeof(T));
  const bool fits =
      info.ndim == 1 && info.itemsize == kSize && (info.size <= 1 || info.strides[0] == kSize);
  TORCH_CHECK_VALUE(fits, "a column has to be one contiguous row of numbers of ", kSize,
                    " bytes each");
  const auto* begin = static_cast<const T*>(info.ptr);
  return std::vector<T>(begin, begin + info.size);
}

py::dict kept_bytes_of(const Counters& c) {
  static const char* reasons[] = {"managed", "source", "small",  "device",
                                  "layout",  "opaque", "unknown"};
  py::dict kept;
  for (int i = 1; i < static_cast<int>(KeptReason::Count); ++i) {
    kept[reasons[i]] = c.kept_bytes[i];
  }
  return kept;
}

// One dict for each tier below the device, nearest first.
py::list tiers_of(const Session& s) {
  const auto lane = [](const Lane& l) {
    const LaneTotals t = l.totals();
    return py::make_tuple(t.transfers, t.bytes, t.busy_s, l.queued_bytes());
  };
  py::list tiers;
  for (const auto& tier : s.tiers.all()) {
    const StoreUsage u = tier.store->usage();
    py::dict d;
    d["tier"] = tier.kind == Tier::Host ? "host" : "disk";
    d["cap_bytes"] = u.cap_bytes;
    d["used_bytes"] = u.used_bytes;
    d["peak_used_bytes"] = u.peak_used_bytes;
    d["taken_bytes"] = u.taken_bytes;
    d["descriptor"] = tier.store->descriptor();
    d["pinned_bytes"] = u.pinned_bytes;
    d["refusals"] = u.refusals;
    d["out"] = lane(*tier.out);
    d["in"] = lane(*tier.in);
    d["streams"] = tier.out->stream_id() == kNoStream
                       ? py::object(py::none())
                       : py::make_tuple(tier.out->stream_id(), tier.in->stream_id());
    tiers.append(d);
  }
  return tiers;
}

using SessionClass = py::class_<Session, c10::intrusive_ptr<Session>>;

// Counters and levels.
void bind_counters(py::module_& m) {
  py::class_<Counters>(m, "Counters", "What a session has counted since its counters were reset.")
      .def_readonly("ops", &Counters::ops)
      .def_readonly("packs", &Counters::packs)
      .def_readonly("unpacks", &Counters::unpacks)
      .def_readonly("managed_unpacks", &Counters::managed_unpacks)
      .def_readonly("packed_bytes", &Counters::packed_bytes)
      .def_readonly("drops", &Counters::drops)
      .def_readonly("dropped_bytes", &Counters::dropped_bytes)
      .def_readonly("rebuilds", &Counters::rebuilds)
      .def_readonly("rebuilt_bytes", &Counters::rebuilt_bytes)
      .def_readonly("replayed_ops", &Counters::replayed_ops)
      .def_readonly("shortcuts", &Counters::shortcuts)
      .def_readonly("shortcut_failures", &Counters::shortcut_failures)
      .def_readonly("rebuild_s", &Counters::rebuild_s)
      .def_readonly("swap_outs", &Counters::swap_outs)
      .def_readonly("swapped_out_bytes", &Counters::swapped_out_bytes)
      .def_readonly("clean_evictions", &Counters::clean_evictions)
      .def_readonly("swap_ins", &Counters::swap_ins)
      .def_readonly("swapped_in_bytes", &Counters::swapped_in_bytes)
      .def_readonly("written_back_bytes", &Counters::written_back_bytes)
      .def_readonly("prefetches", &Counters::prefetches)
      .def_readonly("prefetch_hits", &Counters::prefetch_hits)
      .def_readonly("prefetch_late", &Counters::prefetch_late)
      .def_readonly("prefetch_misses", &Counters::prefetch_misses)
      .def_readonly("prefetch_vain", &Counters::prefetch_vain)
      .def_readonly("swap_refusals", &Counters::swap_refusals)
      .def_readonly("failed_writes", &Counters::failed_writes)
      .def_readonly("failed_reads", &Counters::failed_reads)
      .def_readonly("lost_pages", &Counters::lost_pages)
      .def_readonly("write_error", &Counters::write_error)
      .def_readonly("read_error", &Counters::read_error)
      .def_readonly("out_stall_s", &Counters::out_stall_s)
      .def_readonly("in_stall_s", &Counters::in_stall_s)
      .def_readonly("boundary_evictions", &Counters::boundary_evictions)
      .def_readonly("rescues", &Counters::rescues)
      .def_readonly("rescued_bytes", &Counters::rescued_bytes)
      .def_readonly("over_limit", &Counters::over_limit)
      .def_readonly("shortfalls", &Counters::shortfalls)
      .def_readonly("shortfall_bytes", &Counters::shortfall_bytes)
      .def_readonly("comparisons", &Counters::comparisons)
      .def_readonly("mismatches", &Counters::mismatches)
      .def_readonly("unhashed", &Counters::unhashed)
      .def_readonly("audits", &Counters::audits)
      .def_readonly("audit_failures", &Counters::audit_failures)
      .def_readonly("clones_on_write", &Counters::clones_on_write)
      .def_readonly("pumps", &Counters::pumps)
      .def_readonly("plan_hits", &Counters::plan_hits)
      .def_readonly("plan_misses", &Counters::plan_misses)
      .def_readonly("plan_actions", &Counters::plan_actions)
      .def_readonly("plan_overdue", &Counters::plan_overdue)
      .def_readonly("exposed_bytes", &Counters::exposed_bytes)
      .def_readonly("begin_bytes", &Counters::begin_bytes)
      .def_readonly("stuck_bytes", &Counters::stuck_bytes)
      .def_property_readonly("stuck_op", [](const Counters& c) { return std::string(c.stuck_op); })
      .def_property_readonly("kept_bytes", &kept_bytes_of);
  py::class_<Levels>(m, "Levels", "How much a session has of what, at this moment.")
      .def_readonly("live_tickets", &Levels::live_tickets)
      .def_readonly("pages", &Levels::pages)
      .def_readonly("managed_pages", &Levels::managed_pages)
      .def_readonly("managed_resident_bytes", &Levels::managed_resident_bytes)
      .def_readonly("dropped_now_bytes", &Levels::dropped_now_bytes)
      .def_readonly("swapped_now_bytes", &Levels::swapped_now_bytes)
      .def_readonly("uncounted_bytes", &Levels::uncounted_bytes)
      .def_readonly("step_peak_bytes", &Levels::step_peak_bytes);
}

// How it is made, entered and left.
void bind_life(SessionClass& c) {
  c.def(py::init([](const std::string& device, int64_t budget_bytes, int64_t min_bytes, int verify,
                    int stress, uint64_t seed, bool drop, bool swap, int64_t host_bytes,
                    double link_bytes_per_s, double crossings_out, double crossings_in,
                    int spill_file, int64_t spill_bytes, bool spill_direct, int64_t reserved_bytes,
                    py::object pin, py::object unpin) {
          SessionOptions options;
          options.device = c10::Device(device);
          options.budget_bytes = budget_bytes;
          options.min_bytes = min_bytes;
          options.verify = static_cast<Verify>(verify);
          options.stress = static_cast<Stress>(stress);
          options.seed = seed;
          options.drop = drop;
          options.swap = swap;
          options.host_bytes = host_bytes;
          options.link_bytes_per_s = link_bytes_per_s;
          options.crossings_out = crossings_out;
          options.crossings_in = crossings_in;
          options.spill_file = spill_file;
          options.spill_bytes = spill_bytes;
          options.spill_direct = spill_direct;
          options.reserved_bytes = reserved_bytes;
          if (!pin.is_none()) {
            options.pinning = {pinning_of(std::move(pin)), pinning_of(std::move(unpin))};
          }
          return c10::make_intrusive<Session>(options);
        }),
        py::kw_only(), py::arg("device") = "cpu", py::arg("budget_bytes") = 0,
        py::arg("min_bytes") = 4096, py::arg("verify") = 1, py::arg("stress") = 0,
        py::arg("seed") = 0, py::arg("drop") = true, py::arg("swap") = false,
        py::arg("host_bytes") = 0, py::arg("link_bytes_per_s") = 0.0,
        py::arg("crossings_out") = 1.0, py::arg("crossings_in") = 1.0, py::arg("spill_file") = -1,
        py::arg("spill_bytes") = 0, py::arg("spill_direct") = false, py::arg("reserved_bytes") = 0,
        py::arg("pin") = py::none(), py::arg("unpin") = py::none(),
        "The descriptor `spill_file` stays the caller's, who may close it after this.")
      .def("pack_hook",
           [](const c10::intrusive_ptr<Session>& session) {
             offer_direct_hooks();
             return pack_hook(session);
           })
      .def("unpack_hook", [](const Session&) { return unpack_hook(); })
      .def("enter", &Session::enter)
      .def("leave", &Session::leave)
      .def("rest", &Session::rest,
           "Nobody is in the runtime: raw accesses count only while something is saved.")
      .def(
          "stop_lanes", [](Session& s) { s.tiers.stop(); },
          py::call_guard<py::gil_scoped_release>(),
          "Ends the lanes' threads; what comes later is copied at once.")
      .def("begin_idle", &Session::begin_idle, py::arg("most_bytes"),
           "Instead of entering: wake up at one of the first ops that is not known, and where more "
           "is live. False where something that is saved has to be watched.")
      .def(
          "end_idle", [](Session& s) { s.idle.end(); }, "Look no more. Idempotent, on any thread.")
      .def("begin_step", &Session::begin_step)
      .def("end_step", &Session::end_step)
      .def("forget_past", [](Session& s) { s.state.pages.forget_past(); })
      .def(
          "judge",
          [](Session& s, bool later) {
            const std::string text = s.evidence.keep_verdict(s.evidence.judge());
            if (!later) {
              s.evidence.take_verdict();
            }
            return text;
          },
          py::arg("later") = false, py::call_guard<py::gil_scoped_release>(),
          "Compare, on an accelerator, what came back with what went, waiting for the device if "
          "there is anything to compare. Says what differed; later: and again to whoever asks "
          "next.");
}

// What is freed, copied and written to.
void bind_memory(SessionClass& c) {
  c.def(
       "take_device_seconds",
       [](Session& s) {
         std::vector<StepSeconds> known;
         {
           Guard guard(s.state.lock);
           known = s.tiers.take_device_seconds();
         }
         py::list steps;
         for (const StepSeconds& each : known) {
           steps.append(py::make_tuple(each.step, each.rerun_s, each.out_wait_s, each.in_wait_s));
         }
         return steps;
       },
       "Of steps that are over on an accelerator, each once: its number, and the device's seconds "
       "of reruns, of waits for copies out, and of waits for copies in.")
      .def("step", [](const Session& s) { return s.state.now.step; })
      .def("tiers", &tiers_of,
           "Of each tier below the device: its store, and of its two lanes (transfers, bytes, "
           "busy seconds, bytes queued) and the ids of their streams; None: they have none.")
      .def("take_in_transfers",
           [](Session& s) {
             Guard guard(s.state.lock);
             s.tiers.reap();
           })
      .def("mark_written", [](Session& s, const at::Tensor& t) { s.tensors.mark_written(t); })
      .def("prepare_write", [](Session& s, const at::Tensor& t) { s.tensors.prepare_write(t); })
      .def("take_in", [](Session& s, const at::Tensor& t) { s.tensors.take_in(t); })
      .def(
          "begin_copies",
          [](Session& s) {
            Guard guard(s.state.lock);
            const auto pages = s.state.pages.candidates();
            for (Page* page : pages) {
              s.tiers.write_back(*page);
            }
          },
          "Copy what is saved to a tier below, and free nothing; for tests.")
      .def("make_room",
           [](Session& s, int64_t bytes) { return s.eviction.make_room(bytes, false); })
      .def("set_budget", &Session::set_budget)
      .def("live_bytes", [](const Session& s) { return s.state.account.live_bytes(); })
      .def("begin_alone", [](Session& s) { s.state.account.begin_step(); })
      .def(
          "alone_peak_bytes",
          [](const Session& s) {
            return s.device().is_cpu() ? s.state.account.step_peak_bytes() : s.idle.peak_bytes();
          },
          "The most that was live since `begin_alone`; on an accelerator at the ops of an idle "
          "step.");
}

// Who decides what goes.
void bind_policy(SessionClass& c) {
  c.def(
       "set_pump", [](Session& s, py::object f) { s.eviction.set_pump(callback_of(std::move(f))); },
       "Called with the bytes needed when memory gets tight and no plan is followed.")
      .def(
          "set_step_over",
          [](Session& s, py::object f) { s.ops.set_step_over(callback_of(std::move(f))); },
          "Called when backward is over and another op begins.")
      .def(
          "set_wake", [](Session& s, py::object f) { s.idle.set_wake(callback_of(std::move(f))); },
          "Called at an op of an idle step that is not known, to have the runtime entered.")
      .def(
          "remember_first_ops", [](Session& s) { s.idle.first_ops.remember(); },
          "The step that was observed last fits: one that begins as it did may be idle.")
      .def(
          "forget_first_ops", [](Session& s) { s.idle.first_ops.forget(); }, "None may be.")
      .def("set_taping", [](Session& s, bool on) { s.ops.set_taping(on); })
      .def("set_default_weight",
           [](Session& s, int w) { s.plans.set_default_weight(static_cast<DefaultWeight>(w)); })
      .def(
          "set_drain", [](Session& s, py::object f) { s.ops.set_drain(callback_of(std::move(f))); },
          "Called when many events have piled up.")
      .def("publish",
           [](Session& s, const py::buffer& pages, const py::buffer& weights,
              const py::buffer& exits, int distance) {
             auto ids = rows_from<int64_t>(pages);
             auto w = rows_from<double>(weights);
             auto e = rows_from<int8_t>(exits);
             TORCH_CHECK(ids.size() == w.size() && ids.size() == e.size(), "publish: ", ids.size(),
                         " pages but ", w.size(), " weights and ", e.size(), " exits");
             Guard guard(s.state.lock);
             s.plans.publish(ids, w, e);
             s.plans.set_distance(static_cast<Distance>(distance));
           })
      .def("set_distance",
           [](Session& s, int d) { s.plans.set_distance(static_cast<Distance>(d)); })
      .def("set_plans",
           [](Session& s, std::vector<std::shared_ptr<Plan>> plans) {
             Guard guard(s.state.lock);
             s.plans.set_plans(plans);
           })
      .def("followed_plan", [](Session& s) {
        Guard guard(s.state.lock);
        return s.plans.followed();
      });
}

// What it tells.
void bind_logs(SessionClass& c) {
  c.def("set_tracing", [](Session& s, bool on) { s.state.events.set_tracing(on); })
      .def("drain_trace",
           [](Session& s) {
             std::vector<TraceRow> rows;
             {
               Guard guard(s.state.lock);
               s.tiers.reap();
               rows = s.state.events.drain_trace();
             }
             return rows_of(rows);
           })
      .def("profile",
           [](Session& s) {
             Guard guard(s.state.lock);
             return rows_of(s.state.profile.last());
           })
      .def("counters",
           [](Session& s) {
             s.count_excesses();
             return s.state.counters;
           })
      .def("levels", &Session::levels)
      .def(
          "allocator_bytes",
          [](const Session& s) {
            const DeviceBytes now = device_bytes(s.device());
            return py::make_tuple(now.reserved, now.retries);
          },
          "Of an accelerator: bytes that its allocator has reserved, and how often it gave its "
          "cache back for want of more.")
      .def("packs", [](const Session& s) { return s.state.counters.packs; })
      .def("reset_counters", [](Session& s) { s.state.counters = Counters(); })
      .def("set_logging", [](Session& s, bool on) { s.log.set_logging(on); })
      .def("logging", [](const Session& s) { return s.log.logging(); })
      .def("tick", [](const Session& s) { return s.state.now.tick; })
      .def("step_begin_tick", [](const Session& s) { return s.state.now.begin_tick; })
      .def("cloned_bytes", [](const Session& s) { return s.state.now.cloned_bytes; })
      .def("fingerprint",
           [](const Session& s) { return mix(s.state.now.fingerprint, s.state.now.saves); })
      .def("drain_events",
           [](Session& s) {
             std::vector<Event> events;
             {
               Guard guard(s.state.lock);
               events = s.state.events.drain();
             }
             return rows_of(events);
           })
      .def("leave_out_gone",
           [](Session& s) {
             std::vector<Event> events;  // the GIL keeps others from draining meanwhile
             {
               Guard guard(s.state.lock);
               events = s.state.events.drain();
             }
             const bool can_wait = leave_out_gone(events);
             Guard guard(s.state.lock);
             s.state.events.put_back(std::move(events));
             return can_wait;
           })
      .def("logged_ops", [](const Session& s) { return rows_of(s.log.ops()); })
      .def("logged_inputs", [](const Session& s) { return rows_of(s.log.inputs()); })
      .def("logged_outputs", [](const Session& s) { return rows_of(s.log.outputs()); })
      .def("logged_names", [](const Session& s) {
        py::dict d;
        for (const auto& [hash, info] : s.log.names()) {
          d[py::int_(hash)] = info->name;
        }
        return d;
      });
}

}  // namespace

void bind_session(py::module_& m) {
  bind_counters(m);
  SessionClass c(m, "Session");
  bind_life(c);
  bind_memory(c);
  bind_policy(c);
  bind_logs(c);
}

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(
      py::init([](const py::buffer& fingerprints, const std::vector<std::string>& op_names,
                  const py::buffer& makers, const py::buffer& bytes, const py::buffer& weights,
                  const py::buffer& use_offsets, const py::buffer& uses,
                  const py::buffer& interval_offsets, const py::buffer& dropped_twice,
                  const py::buffer& begins, const py::buffer& ends, const py::buffer& exits,
                  const py::buffer& copy_back_at, bool as_written) {
        auto plan = std::make_shared<Plan>();
        plan->fingerprint = rows_from<uint64_t>(fingerprints);
        plan->bytes = rows_from<int64_t>(bytes);
        std::vector<uint64_t> hashes;
        std::transform(op_names.begin(), op_names.end(), std::back_inserter(hashes), hash_of_name);
        for (const int64_t maker : rows_from<int64_t>(makers)) {
          plan->maker.push_back(hashes.at(static_cast<size_t>(maker)));
        }
        plan->weight = rows_from<double>(weights);
        plan->use_offsets = rows_from<int64_t>(use_offsets);
        plan->uses = rows_from<int64_t>(uses);
        plan->interval_offsets = rows_from<int64_t>(interval_offsets);
        plan->dropped_twice = rows_from<int8_t>(dropped_twice);
        plan->begin = rows_from<int64_t>(begins);
        plan->end = rows_from<int64_t>(ends);
        plan->exit = rows_from<int64_t>(exits);
        plan->copy_back_at = rows_from<int64_t>(copy_back_at);
        plan->as_written = as_written;
        plan->check();
        plan->sort();
        return plan;
      }),
      py::kw_only(), py::arg("fingerprints"), py::arg("op_names"), py::arg("makers"),
      py::arg("bytes"), py::arg("weights"), py::arg("use_offsets"), py::arg("uses"),
      py::arg("interval_offsets"), py::arg("dropped_twice"), py::arg("begins"), py::arg("ends"),
      py::arg("exits"), py::arg("copy_back_at"), py::arg("as_written") = false);
}

}  // namespace delta
