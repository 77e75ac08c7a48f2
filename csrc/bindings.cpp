// delta_runtime._C, as Python sees it.
//
// Threads and the GIL: every function here is called with the GIL. Rebuilding runs with the GIL
// released. The pump takes the GIL at an op boundary, with no lock of ours held.
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <new>

#include "observe/data_setter.h"
#include "observe/observer.h"
#include "pool/cpu_pool.h"
#include "rebuild/replay.h"
#include "state/session.h"
#include "tiers/spill_file.h"
#include "tiers/stream_lane.h"
#include "util/errors.h"
#include "util/plain_frames.h"
#include "util/python_random.h"
#include "util/signals.h"

namespace py = pybind11;

namespace delta {
namespace {

PyTypeObject* g_ticket_type = nullptr;
PyObject* g_inplace_error = nullptr;
PyObject* g_mismatch_error = nullptr;
PyObject* g_swap_error = nullptr;
PyObject* g_budget_error = nullptr;

struct BudgetPassedError : torch::PyTorchError, BudgetPassed {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override {
    return g_budget_error != nullptr ? g_budget_error : PyExc_RuntimeError;
  }
};

struct PyTicket {
  PyObject_HEAD Ticket ticket;
};

void ticket_dealloc(PyObject* self) {
  reinterpret_cast<PyTicket*>(self)->ticket.~Ticket();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Turns the C++ exception in flight into a Python one.
void set_python_error() {
  try {
    throw;
  } catch (const InplaceModificationError& e) {
    PyErr_SetString(g_inplace_error != nullptr ? g_inplace_error : PyExc_RuntimeError, e.what());
  } catch (const RecomputeMismatchError& e) {
    PyErr_SetString(g_mismatch_error != nullptr ? g_mismatch_error : PyExc_RuntimeError, e.what());
  } catch (const SwapFailedError& e) {
    PyErr_SetString(g_swap_error != nullptr ? g_swap_error : PyExc_RuntimeError, e.what());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  prefer_signals();
}

// pack(tensor) -> ticket. `self` is the session that the hook was made for.
PyObject* py_pack(PyObject* self, PyObject* argument) {
  auto* object = PyObject_New(PyTicket, g_ticket_type);
  if (object == nullptr) {
    return nullptr;
  }
  new (&object->ticket) Ticket();
  try {
    auto* session = reinterpret_cast<Session*>(PyCapsule_GetPointer(self, "delta_runtime.session"));
    session->pack(THPVariable_Unpack(argument), object->ticket);
  } catch (...) {
    set_python_error();
    Py_DECREF(reinterpret_cast<PyObject*>(object));
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(object);
}

// unpack(ticket) -> tensor. Works on any thread, any number of times, also after the session was
// left.
PyObject* py_unpack(PyObject* /*self*/, PyObject* argument) {
  if (Py_TYPE(argument) != g_ticket_type) {
    PyErr_SetString(PyExc_TypeError, "delta_runtime: unpack takes a ticket that pack returned");
    return nullptr;
  }
  Ticket& ticket = reinterpret_cast<PyTicket*>(argument)->ticket;
  try {
    at::Tensor t = ticket.session->unpack_resident(ticket);
    if (!t.defined()) {
      // Ops will run; or somebody else brings it back right now, and needs the GIL for that.
      py::gil_scoped_release no_gil;
      let_signals_in();
      t = ticket.session->unpack(ticket);
    }
    return THPVariable_Wrap(std::move(t));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

}  // namespace

bool is_pack_hook(PyObject* hook) {
  return hook != nullptr && PyCFunction_Check(hook) && PyCFunction_GET_FUNCTION(hook) == py_pack;
}

namespace {

PyMethodDef g_pack_method = {"pack", py_pack, METH_O,
                             "Give autograd a ticket for a tensor that it saves."};
PyMethodDef g_unpack_method = {"unpack", py_unpack, METH_O,
                               "Give the saved tensor for a ticket back."};

void release_capsule(PyObject* capsule) {
  auto* session =
      reinterpret_cast<Session*>(PyCapsule_GetPointer(capsule, "delta_runtime.session"));
  c10::intrusive_ptr<Session>::reclaim(session).reset();
}

py::object hook(const c10::intrusive_ptr<Session>& session, PyMethodDef* method) {
  auto copy = session;
  auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(copy.release(), "delta_runtime.session", release_capsule));
  return py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule.ptr()));
}

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
  for (const auto& tier : s.tiers_) {
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

// A Python callable that C++ may call at an op boundary, from a thread with or without the GIL.
std::function<void(int64_t)> callback_of(py::object callable) {
  if (callable.is_none()) {
    return nullptr;
  }
  auto holder =
      std::shared_ptr<py::object>(new py::object(std::move(callable)), [](py::object* object) {
        py::gil_scoped_acquire gil;
        delete object;
      });
  return [holder](int64_t argument) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;  // an error may be pending when an op runs inside a destructor
    Shield shield;
    PlainFrames plain;
    try {
      (*holder)(argument);
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_Exception) && !e.matches(PyExc_Warning)) {
        e.discard_as_unraisable(
            "delta_runtime: the policy failed; evicting by the last known weights");
      } else {  // an interrupt; a warning, where those are errors
        e.restore();
        raise_later();
      }
    }
  };
}

// An object that may be let go of without the GIL.
std::shared_ptr<py::object> shared(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
}

// A Python callable (address, bytes) -> whether it worked. An error is a no.
std::function<bool(void*, int64_t)> pinning_of(py::object callable) {
  auto holder =
      std::shared_ptr<py::object>(new py::object(std::move(callable)), [](py::object* object) {
        py::gil_scoped_acquire gil;
        delete object;
      });
  return [holder](void* begin, int64_t bytes) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;
    Shield shield;
    PlainFrames plain;
    try {
      return (*holder)(reinterpret_cast<uintptr_t>(begin), bytes).cast<bool>();
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_Exception)) {
        e.discard_as_unraisable("delta_runtime: pinning host memory failed");
      } else {
        e.restore();
        raise_later();
      }
      return false;
    }
  };
}

// The sessions that listen, and all that have tensors saved: a closed one may.
std::vector<c10::intrusive_ptr<Session>> all_that_hear(const py::list& listeners) {
  auto heard = watching_sessions();
  for (const auto& listener : listeners) {
    auto session = listener.cast<c10::intrusive_ptr<Session>>();
    if (std::find(heard.begin(), heard.end(), session) == heard.end()) {
      heard.push_back(std::move(session));
    }
  }
  return heard;
}

void bind_pool(py::module_& m) {
  auto pool = m.def_submodule("cpu_pool", "The CPU allocator with a capacity.");
  pool.def("install", &cpu_pool::install);
  pool.def("installed", &cpu_pool::installed);
  pool.def("set_capacity", &cpu_pool::set_capacity, "Bytes; 0 lifts it.");
  pool.def("set_soft_limit", &cpu_pool::set_soft_limit, "Bytes; 0 lifts it.");
  pool.def("capacity_bytes", [] { return cpu_pool::limits().capacity_bytes; });
  pool.def("soft_limit_bytes", [] { return cpu_pool::limits().soft_limit_bytes; });
  pool.def("set_rescue_enabled", &cpu_pool::set_rescue_enabled);
  pool.def("live_bytes", &cpu_pool::live_bytes);
  pool.def("resident_bytes", &cpu_pool::resident_bytes);
  pool.def("idle_bytes", &cpu_pool::idle_bytes);
  pool.def("peak_bytes", &cpu_pool::peak_bytes);
  pool.def("reset_peak", &cpu_pool::reset_peak);
  pool.def("allocation_count", &cpu_pool::allocation_count);
  pool.def("take_refused_bytes", &cpu_pool::take_refused_bytes);
  pool.def("set_soft_limit_is_hard", &cpu_pool::set_soft_limit_is_hard);
  pool.def("reset_step_peak", &cpu_pool::reset_step_peak);
  pool.def("step_peak_bytes", &cpu_pool::step_peak_bytes);
  pool.def("rescue_count", &cpu_pool::rescue_count);
  pool.def("rescued_bytes", &cpu_pool::rescued_bytes);
  pool.def("over_limit_peak_bytes", &cpu_pool::over_limit_peak_bytes);
  pool.def("reset_counters", &cpu_pool::reset_counters);
}

void bind_session(py::module_& m) {
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

  py::class_<Session, c10::intrusive_ptr<Session>>(m, "Session")
      .def(py::init([](const std::string& device, int64_t budget_bytes, int64_t min_bytes,
                       int verify, int stress, uint64_t seed, bool drop, bool swap,
                       int64_t host_bytes, double link_bytes_per_s, int spill_file,
                       int64_t spill_bytes, bool spill_direct, py::object pin, py::object unpin) {
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
             options.spill_file = spill_file;
             options.spill_bytes = spill_bytes;
             options.spill_direct = spill_direct;
             if (!pin.is_none()) {
               options.pinning = {pinning_of(std::move(pin)), pinning_of(std::move(unpin))};
             }
             return c10::make_intrusive<Session>(options);
           }),
           py::kw_only(), py::arg("device") = "cpu", py::arg("budget_bytes") = 0,
           py::arg("min_bytes") = 4096, py::arg("verify") = 1, py::arg("stress") = 0,
           py::arg("seed") = 0, py::arg("drop") = true, py::arg("swap") = false,
           py::arg("host_bytes") = 0, py::arg("link_bytes_per_s") = 0.0, py::arg("spill_file") = -1,
           py::arg("spill_bytes") = 0, py::arg("spill_direct") = false, py::arg("pin") = py::none(),
           py::arg("unpin") = py::none(),
           "The descriptor `spill_file` stays the caller's, who may close it after this.")
      .def("pack_hook", [](c10::intrusive_ptr<Session> s) { return hook(s, &g_pack_method); })
      .def("unpack_hook", [](c10::intrusive_ptr<Session> s) { return hook(s, &g_unpack_method); })
      .def("enter", &Session::enter)
      .def("leave", &Session::leave)
      .def("rest", &Session::rest,
           "Nobody is in the runtime: raw accesses count only while something is saved.")
      .def("stop_lanes", &Session::stop_lanes, py::call_guard<py::gil_scoped_release>(),
           "Ends the lanes' threads; what comes later is copied at once.")
      .def("tiers", &tiers_of,
           "Of each tier below the device: its store, and of its two lanes (transfers, bytes, "
           "busy seconds, bytes queued) and the ids of their streams; None: they have none.")
      .def("set_tracing", [](Session& s, bool on) { s.tracing_ = on; })
      .def("take_in_transfers",
           [](Session& s) {
             Session::Guard guard(s);
             s.reap();
           })
      .def("drain_trace",
           [](Session& s) {
             std::vector<TraceRow> rows;
             {
               Session::Guard guard(s);
               s.reap();
               rows.swap(s.trace_);
             }
             return rows_of(rows);
           })
      .def("begin_step", &Session::begin_step)
      .def("end_step", &Session::end_step)
      .def("forget_past", &Session::forget_past)
      .def(
          "judge",
          [](Session& s, bool later) {
            const std::string text = s.keep_verdict(s.judge());
            if (!later) {
              s.take_verdict();
            }
            return text;
          },
          py::arg("later") = false, py::call_guard<py::gil_scoped_release>(),
          "Compare, on an accelerator, what came back with what went, waiting for the device if "
          "there is anything to compare. Says what differed; later: and again to whoever asks "
          "next.")
      .def("mark_written", &Session::mark_written)
      .def("prepare_write", &Session::prepare_write)
      .def(
          "begin_copies",
          [](Session& s) {
            Session::Guard guard(s);
            const auto pages = s.candidates_;
            for (Page* page : pages) {
              s.write_back(*page);
            }
          },
          "Copy what is saved to a tier below, and free nothing; for tests.")
      .def("make_room", [](Session& s, int64_t bytes) { return s.make_room(bytes, false); })
      .def("counters", [](const Session& s) { return s.counters_; })
      .def("levels", &Session::levels)
      .def("packs", [](const Session& s) { return s.counters_.packs; })
      .def("reset_counters", [](Session& s) { s.counters_ = Counters(); })
      .def("set_budget", &Session::set_budget)
      .def("live_bytes", &Session::live_bytes)
      .def(
          "set_pump", [](Session& s, py::object f) { s.pump_ = callback_of(std::move(f)); },
          "Called with the bytes needed when memory gets tight and no plan is followed.")
      .def(
          "set_boundary", [](Session& s, py::object f) { s.boundary_ = callback_of(std::move(f)); },
          "Called when backward is over and another op begins.")
      .def("set_taping", [](Session& s, bool on) { s.taping_ = on; })
      .def("set_default_weight",
           [](Session& s, int w) { s.default_weight_ = static_cast<DefaultWeight>(w); })
      .def("set_logging", [](Session& s, bool on) { s.logging_ = on; })
      .def("logging", [](const Session& s) { return s.logging_; })
      .def(
          "set_drain", [](Session& s, py::object f) { s.drain_ = callback_of(std::move(f)); },
          "Called when many events have piled up.")
      .def("tick", [](const Session& s) { return s.tick_; })
      .def("step_begin_tick", [](const Session& s) { return s.step_begin_tick_; })
      .def("cloned_bytes", [](const Session& s) { return s.cloned_bytes_; })
      .def("fingerprint", [](const Session& s) { return mix(s.fingerprint_, s.saves_); })
      .def("drain_events",
           [](Session& s) {
             std::vector<Event> events;
             {
               Session::Guard guard(s);
               events.swap(s.events_);
             }
             return rows_of(events);
           })
      .def("logged_ops", [](const Session& s) { return rows_of(s.log_ops_); })
      .def("logged_inputs", [](const Session& s) { return rows_of(s.log_inputs_); })
      .def("logged_outputs", [](const Session& s) { return rows_of(s.log_outputs_); })
      .def("logged_names",
           [](const Session& s) {
             py::dict d;
             for (const auto& [hash, info] : s.log_names_) {
               d[py::int_(hash)] = info->name;
             }
             return d;
           })
      .def("publish",
           [](Session& s, const py::buffer& pages, const py::buffer& weights,
              const py::buffer& exits, int distance) {
             auto ids = rows_from<int64_t>(pages);
             auto w = rows_from<double>(weights);
             auto e = rows_from<int8_t>(exits);
             TORCH_CHECK(ids.size() == w.size() && ids.size() == e.size(), "publish: ", ids.size(),
                         " pages but ", w.size(), " weights and ", e.size(), " exits");
             Session::Guard guard(s);
             for (size_t i = 0; i < ids.size(); ++i) {
               auto it = s.managed_.find(ids[i]);
               if (it != s.managed_.end()) {
                 it->second->weight = w[i];
                 it->second->exit = static_cast<Exit>(e[i]);
               }
             }
             s.distance_ = static_cast<Distance>(distance);
           })
      .def("set_distance", [](Session& s, int d) { s.distance_ = static_cast<Distance>(d); })
      .def("set_plans", [](Session& s, std::vector<std::shared_ptr<Plan>> plans) {
        Session::Guard guard(s);
        s.plans_.assign(plans.begin(), plans.end());
        s.plan_ = nullptr;
      });
}

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(
      py::init([](const py::buffer& fingerprints, const py::buffer& weights,
                  const py::buffer& use_offsets, const py::buffer& uses,
                  const py::buffer& interval_offsets, const py::buffer& dropped_twice,
                  const py::buffer& exits, const py::buffer& copy_back_at) {
        auto plan = std::make_shared<Plan>();
        plan->fingerprint = rows_from<uint64_t>(fingerprints);
        plan->weight = rows_from<double>(weights);
        plan->use_offsets = rows_from<int64_t>(use_offsets);
        plan->uses = rows_from<int64_t>(uses);
        plan->interval_offsets = rows_from<int64_t>(interval_offsets);
        plan->dropped_twice = rows_from<int8_t>(dropped_twice);
        plan->exit = rows_from<int64_t>(exits);
        plan->copy_back_at = rows_from<int64_t>(copy_back_at);
        plan->check();
        return plan;
      }),
      py::kw_only(), py::arg("fingerprints"), py::arg("weights"), py::arg("use_offsets"),
      py::arg("uses"), py::arg("interval_offsets"), py::arg("dropped_twice"), py::arg("exits"),
      py::arg("copy_back_at"));
}

// Where the value lies that a ticket stands for.
const char* place_of(const Ticket& ticket) {
  if (ticket.state != Ticket::State::Managed) {
    return "kept";
  }
  const Session& session = *ticket.session;
  Session::Guard guard(*ticket.session);
  const Page& page = *ticket.page;
  switch (page.residency()) {
    case Residency::Resident:
      return page.below.copy && !page.below.copy->transfer->ended() ? "copying" : "resident";
    case Residency::Dropped:
      return "dropped";
    case Residency::Swapped:
      return session.tiers_[page.below.copy->tier].kind == Tier::Host ? "host" : "disk";
    case Residency::SwappingIn:
      return "copying";
    case Residency::Lost:
      return "lost";
  }
  return "lost";
}

void bind_ticket(py::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(ticket_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"delta_runtime._C.Ticket", sizeof(PyTicket), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  g_ticket_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  m.add_object("Ticket",
               py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(g_ticket_type)));
  m.def(
      "place_of",
      [](const py::object& ticket) {
        TORCH_CHECK(Py_TYPE(ticket.ptr()) == g_ticket_type, "place_of takes a ticket");
        return place_of(reinterpret_cast<PyTicket*>(ticket.ptr())->ticket);
      },
      "Where the value of a ticket lies now: kept, resident, copying, dropped, host, disk or lost. "
      "For stress runs, which want to know what they have tried.");
}

}  // namespace

void throw_budget_passed(const std::string& message) { throw BudgetPassedError(message); }

}  // namespace delta

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const delta::InplaceModificationError& e) {
      PyErr_SetString(
          delta::g_inplace_error != nullptr ? delta::g_inplace_error : PyExc_RuntimeError,
          e.what());
    } catch (const delta::RecomputeMismatchError& e) {
      PyErr_SetString(
          delta::g_mismatch_error != nullptr ? delta::g_mismatch_error : PyExc_RuntimeError,
          e.what());
    } catch (const delta::SwapFailedError& e) {
      PyErr_SetString(delta::g_swap_error != nullptr ? delta::g_swap_error : PyExc_RuntimeError,
                      e.what());
    } catch (delta::BudgetPassedError& e) {
      PyErr_SetString(e.python_type(), e.what());
    }
  });
  m.doc() = "delta_runtime's extension: observes ops and saved tensors, frees and rebuilds them.";
  delta::bind_pool(m);
  delta::bind_session(m);
  delta::bind_plan(m);
  delta::bind_ticket(m);
  if (!delta::bind_signals(m.ptr())) {
    throw py::error_already_set();
  }
  m.def(
      "set_sabotage", [](int which) { delta::set_sabotage(static_cast<delta::Sabotage>(which)); },
      "Break one rule of replay on purpose, for the tests that prove that the tests can fail; 0 "
      "mends it.");
  m.def(
      "set_most_watched_bytes",
      [](int64_t bytes) { return std::exchange(delta::most_watched_bytes, bytes); },
      "For tests: storages of more bytes are not hashed. Returns what it was.");
  m.def("sabotage_names", &delta::sabotage_names, "What set_sabotage can break, by number.");
  m.def(
      "set_python_random",
      [](py::object save, py::object restore) {
        delta::PythonRandom hooks;
        auto saver = delta::shared(std::move(save));
        auto restorer = delta::shared(std::move(restore));
        hooks.save = [saver]() -> std::shared_ptr<void> {
          py::gil_scoped_acquire gil;
          py::error_scope pending;
          delta::Shield shield;
          delta::PlainFrames plain;
          return delta::shared((*saver)());
        };
        hooks.restore = [restorer](const std::shared_ptr<void>& state) {
          py::gil_scoped_acquire gil;
          py::error_scope pending;
          delta::Shield shield;  // what a handler raises would end this half-way
          delta::PlainFrames plain;
          try {
            (*restorer)(*std::static_pointer_cast<py::object>(state));
          } catch (py::error_already_set& e) {
            e.discard_as_unraisable("delta_runtime: putting Python's random state back failed");
          }
        };
        delta::set_python_random(std::move(hooks));
      },
      "How the generators of Python and numpy are kept and put back around an op in Python.");
  m.def("set_poison", &delta::set_poison,
        "Fill host memory that is given back with NaN, for tests of who still reads it.");
  m.def(
      "allocate_with_error_pending",
      [](int64_t bytes) {
        PyErr_SetString(PyExc_ValueError, "pending");
        auto data = c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
        const bool kept = PyErr_ExceptionMatches(PyExc_ValueError) != 0;
        PyErr_Clear();
        return kept && data.get() != nullptr;
      },
      "For tests: allocate while Python's error indicator is set; whether it still was "
      "afterwards.");
  m.def("enter_bare_observer", &delta::enter_bare_observer,
        "Observe every op and do nothing: the floor.");
  m.def("leave_bare_observer", &delta::leave_bare_observer);
  m.def(
      "device_hash",
      [](const at::Tensor& t, int64_t budget_bytes) {
        delta::DeviceHashes table(t.device(), budget_bytes);
        const int32_t row = table.hash(t.storage(), delta::current_stream_id(t.device()));
        TORCH_CHECK(row >= 0, "no hash could be made");
        const delta::Hash128 hash = table.read()[static_cast<size_t>(row)];
        return py::make_tuple(hash.words[0], hash.words[1]);
      },
      py::arg("t"), py::arg("budget_bytes") = 1 << 30,
      "The hash of all bytes of a tensor's storage on an accelerator, for tests.");
  m.def(
      "before_raw_access",
      [](const py::object& object, bool writes, int64_t loan, const py::list& listeners) {
        c10::Storage storage;
        if (THPVariable_Check(object.ptr())) {
          const auto& t = THPVariable_Unpack(object.ptr());
          storage = delta::is_plain(t) ? t.storage() : c10::Storage();
        } else if (THPStorage_Check(object.ptr())) {
          storage = THPStorage_Unpack(object.ptr());
        }
        const auto heard = delta::all_that_hear(listeners);
        if (storage) {
          for (const auto& session : heard) {
            session->before_raw_access(storage, writes, loan);
          }
        }
        return !heard.empty();
      },
      py::arg("tensor_or_storage"), py::arg("writes"), py::arg("loan"), py::arg("listeners"),
      "Python code is about to get hold of its memory, or to write to it unseen. Tells these\n"
      "sessions and all that have tensors saved. `loan` is a number for the array that it gets, "
      "to\n"
      "be given to take_back when that is gone; -1: there is none. False: nobody was told.");
  m.def(
      "take_back",
      [](const std::vector<int64_t>& loans, const py::list& listeners) {
        for (const auto& session : delta::all_that_hear(listeners)) {
          session->take_back(loans);
        }
      },
      py::arg("loans"), py::arg("listeners"), "The arrays of these loans are gone.");
  m.def(
      "any_watches", [] { return !delta::watching_sessions().empty(); },
      "Whether a session is entered or has tensors saved, closed or not.");
  m.def("live_records", &delta::live_records, "Op records alive in this process.");
  m.def("preallocate", &delta::preallocate, py::call_guard<py::gil_scoped_release>(),
        "Take disk space for the first bytes of a file now; 0 or an errno.");
  m.def(
      "watch_data_setter", [] { delta::watch_data_setter(); },
      "Keep saved tensors that are pointed to other memory by `tensor.data = other`. Idempotent.");
  m.def("forget_locks", &delta::forget_locks,
        "In a forked child: whoever held the sessions' locks does not exist there.");
  m.def(
      "release_repointed", [] { delta::release_repointed(); },
      "Let go of those of them that no backward waits for.");
  m.def(
      "set_budget_error", [](py::object type) { delta::g_budget_error = type.release().ptr(); },
      "The exception of an allocation that would pass the budget, strictly; it takes a message.");
  m.def("set_error_types", [](py::object inplace, py::object mismatch, py::object swap) {
    delta::g_inplace_error = inplace.release().ptr();
    delta::g_mismatch_error = mismatch.release().ptr();
    delta::g_swap_error = swap.release().ptr();
  });
}
