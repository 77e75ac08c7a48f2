// delta_runtime._C, as Python sees it.
//
// Threads and the GIL: every function here is called with the GIL. Rebuilding runs with the GIL
// released. The pump takes the GIL at an op boundary, with no lock of ours held.
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bindings/callbacks.h"
#include "bindings/direct_hooks.h"
#include "bindings/dry_run.h"
#include "bindings/errors.h"
#include "bindings/planners.h"
#include "bindings/session.h"
#include "bindings/simulate.h"
#include "bindings/ticket.h"
#include "observe/data_setter.h"
#include "observe/observer.h"
#include "observe/op_rescue.h"
#include "pool/cpu_pool.h"
#include "pool/limited_allocator.h"
#include "rebuild/device_hash.h"
#include "state/entered.h"
#include "state/session.h"
#include "tiers/spill_file.h"
#include "util/plain_frames.h"
#include "util/python_random.h"
#include "util/signals.h"
#include "util/streams.h"

namespace delta {
namespace {

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
  pool.def("full_count", &cpu_pool::full_count);
  pool.def("take_refused_bytes", &cpu_pool::take_refused_bytes);
  pool.def("set_soft_limit_is_hard", &cpu_pool::set_soft_limit_is_hard);
  pool.def("reset_step_peak", &cpu_pool::reset_step_peak);
  pool.def("step_peak_bytes", &cpu_pool::step_peak_bytes);
  pool.def("rescue_count", &cpu_pool::rescue_count);
  pool.def("rescued_bytes", &cpu_pool::rescued_bytes);
  pool.def("over_limit_peak_bytes", &cpu_pool::over_limit_peak_bytes);
  pool.def("reset_counters", &cpu_pool::reset_counters);
}

void bind_limited_allocators(py::module_& m) {
  m.def(
      "set_limited_allocator",
      [](const std::string& device, const std::optional<py::capsule>& allocator) {
        const char* name = allocator ? allocator->name() : nullptr;
        TORCH_CHECK(!allocator || (name != nullptr && std::string(name) == kLimitedAllocatorName),
                    "this allocator was built for another version of delta_runtime");
        set_limited_allocator(c10::Device(device),
                              allocator ? allocator->get_pointer<LimitedAllocator>() : nullptr);
      },
      py::arg("device"), py::arg("allocator"),
      "Have the sessions of a device that are made from now on keep its reserved bytes to their "
      "budget, by the LimitedAllocator in a capsule, which must live for good; None: by nothing.");
  m.def(
      "has_limited_allocator",
      [](const std::string& device) { return limited_allocator(c10::Device(device)) != nullptr; },
      py::arg("device"));
}

// For tests and benchmarks.
void bind_switches(py::module_& m) {
  m.def("set_op_rescue_enabled", &set_op_rescue_enabled);
  m.def(
      "set_sabotage", [](int which) { set_sabotage(static_cast<Sabotage>(which)); },
      "Break one rule of replay on purpose, for the tests that prove that the tests can fail; 0 "
      "mends it.");
  m.def(
      "set_most_watched_bytes",
      [](int64_t bytes) { return std::exchange(most_watched_bytes, bytes); },
      "For tests: storages of more bytes are not hashed. Returns what it was.");
  m.def("sabotage_names", &sabotage_names, "What set_sabotage can break, by number.");
  m.def("set_poison", &set_poison,
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
  m.def("enter_bare_observer", &enter_bare_observer, "Observe every op and do nothing: the floor.");
  m.def("leave_bare_observer", &leave_bare_observer);
  m.def(
      "device_hash",
      [](const at::Tensor& t, int64_t budget_bytes) {
        DeviceHashes table(t.device(), budget_bytes);
        const int32_t row = table.hash(t.storage(), current_stream_id(t.device()));
        TORCH_CHECK(row >= 0, "no hash could be made");
        const Hash128 hash = table.read()[static_cast<size_t>(row)];
        return py::make_tuple(hash.words[0], hash.words[1]);
      },
      py::arg("t"), py::arg("budget_bytes") = 1 << 30,
      "The hash of all bytes of a tensor's storage on an accelerator, for tests.");
  m.def("live_records", &live_records, "Op records alive in this process.");
}

// Memory that Python gets hold of, or points tensors to.
void bind_raw_access(py::module_& m) {
  m.def(
      "before_raw_access",
      [](const py::object& object, bool writes, int64_t loan, const py::list& listeners) {
        c10::Storage storage;
        if (THPVariable_Check(object.ptr())) {
          const auto& t = THPVariable_Unpack(object.ptr());
          storage = is_plain(t) ? t.storage() : c10::Storage();
        } else if (THPStorage_Check(object.ptr())) {
          storage = THPStorage_Unpack(object.ptr());
        }
        const auto heard = all_that_hear(listeners);
        if (storage) {
          for (const auto& session : heard) {
            session->tensors.before_raw_access(storage, writes, loan);
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
        for (const auto& session : all_that_hear(listeners)) {
          session->outside.take_back(loans);
        }
      },
      py::arg("loans"), py::arg("listeners"), "The arrays of these loans are gone.");
  m.def(
      "any_watches", [] { return !watching_sessions().empty(); },
      "Whether a session is entered or has tensors saved, closed or not.");
  m.def(
      "watch_data_setter", [] { watch_data_setter(); },
      "Keep saved tensors that are pointed to other memory by `tensor.data = other`. Idempotent.");
  m.def(
      "release_repointed", [] { release_repointed(); },
      "Let go of those of them that no backward waits for.");
}

// What is of the process rather than of a session.
void bind_process(py::module_& m) {
  m.def(
      "set_python_random",
      [](py::object save, py::object restore) {
        PythonRandom hooks;
        auto saver = shared(std::move(save));
        auto restorer = shared(std::move(restore));
        hooks.save = [saver]() -> std::shared_ptr<void> {
          py::gil_scoped_acquire gil;
          py::error_scope pending;
          Shield shield;
          PlainFrames plain;
          return shared((*saver)());
        };
        hooks.restore = [restorer](const std::shared_ptr<void>& state) {
          py::gil_scoped_acquire gil;
          py::error_scope pending;
          Shield shield;  // what a handler raises would end this half-way
          PlainFrames plain;
          try {
            (*restorer)(*std::static_pointer_cast<py::object>(state));
          } catch (py::error_already_set& e) {
            e.discard_as_unraisable("delta_runtime: putting Python's random state back failed");
          }
        };
        set_python_random(std::move(hooks));
      },
      "How the generators of Python and numpy are kept and put back around an op in Python.");
  m.def("use_direct_hooks", &use_direct_hooks, py::arg("wanted"),
        "Whether autograd has sessions' hooks as C++ objects, where it finds their pair on top.");
  m.def(
      "rescue_no_ops", [] { rescue_ops(false); },
      "This thread's ops are not run again any more: autograd may put that back behind a "
      "backward.");
  m.def(
      "suspend_idle",
      [](bool on) {
        if (IdleStep* idle = thread_state().idle) {
          idle->suspend(on);
        }
      },
      "Whether an idle step on this thread, if one goes on, is not looked at; counts.");
  m.def("preallocate", &preallocate, py::call_guard<py::gil_scoped_release>(),
        "Take disk space for the first bytes of a file now; 0 or an errno.");
  m.def("forget_locks", &forget_locks,
        "In a forked child: whoever held the sessions' locks does not exist there.");
}

}  // namespace
}  // namespace delta

PYBIND11_MODULE(_C, m) {
  m.doc() = "delta_runtime's extension: observes ops and saved tensors, frees and rebuilds them.";
  delta::bind_pool(m);
  delta::bind_limited_allocators(m);
  delta::bind_session(m);
  delta::bind_plan(m);
  delta::bind_planners(m);
  delta::bind_simulate(m);
  delta::bind_dry_run(m);
  delta::bind_ticket(m);
  delta::bind_errors(m);
  if (!delta::bind_signals(m.ptr())) {
    throw py::error_already_set();
  }
  delta::bind_switches(m);
  delta::bind_raw_access(m);
  delta::bind_process(m);
}
