#include "bindings/simulate.h"

#include <memory>
#include <utility>

#include "bindings/columns.h"
#include "simulate/virtual_step.h"

namespace delta {
namespace {

ListsOf lists_of(const Ints& offsets, const Ints& items) {
  return {copied(offsets), copied(items)};
}

StepColumns step_columns(const Ints& op_tick, const Floats& op_seconds, const Floats& again_seconds,
                         const Ints& ordinary_bytes, const Ints& behind_bytes,
                         const Ints& watermark_bytes, const Mask& backward,
                         const Ints& read_offsets, const Ints& reads, const Ints& value_op,
                         const Ints& value_bytes, const Ints& saved, const Ints& saved_at,
                         const Ints& alone_at, const Ints& released_at, const Ints& use_offsets,
                         const Ints& uses, const Mask& possible, const Ints& recipe_op_offsets,
                         const Ints& recipe_ops, const Ints& parent_offsets, const Ints& parents,
                         int64_t ticks) {
  StepColumns step;
  step.op_tick = copied(op_tick);
  step.op_seconds = copied(op_seconds);
  step.again_seconds = copied(again_seconds);
  step.ordinary_bytes = copied(ordinary_bytes);
  step.behind_bytes = copied(behind_bytes);
  step.watermark_bytes = copied(watermark_bytes);
  step.backward = flags(backward);
  step.reads = lists_of(read_offsets, reads);
  step.value_op = copied(value_op);
  step.value_bytes = copied(value_bytes);
  step.saved = copied(saved);
  step.saved_at = copied(saved_at);
  step.alone_at = copied(alone_at);
  step.released_at = copied(released_at);
  step.uses = lists_of(use_offsets, uses);
  step.possible = flags(possible);
  step.recipe_ops = lists_of(recipe_op_offsets, recipe_ops);
  step.parents = lists_of(parent_offsets, parents);
  step.ticks = ticks;
  step.check();
  return step;
}

VirtualDevice virtual_device(int64_t budget_bytes, bool drops, double out_bytes_per_s,
                             double in_bytes_per_s, int64_t host_bytes, int64_t min_bytes,
                             bool is_cpu, int distance, int default_weight) {
  VirtualDevice device;
  device.budget_bytes = budget_bytes;
  device.drops = drops;
  device.out_bytes_per_s = out_bytes_per_s;
  device.in_bytes_per_s = in_bytes_per_s;
  device.host_bytes = host_bytes;
  device.min_bytes = min_bytes;
  device.is_cpu = is_cpu;
  device.distance = static_cast<Distance>(distance);
  device.default_weight = static_cast<DefaultWeight>(default_weight);
  return device;
}

}  // namespace

void bind_simulate(py::module_& m) {
  auto simulate =
      m.def_submodule("simulate", "A recorded step on a virtual device; csrc/simulate.");
  simulate.attr("Plan") = m.attr("Plan");
  py::class_<StepColumns>(simulate, "StepColumns")
      .def(py::init(&step_columns), py::kw_only(), py::arg("op_tick"), py::arg("op_seconds"),
           py::arg("again_seconds"), py::arg("ordinary_bytes"), py::arg("behind_bytes"),
           py::arg("watermark_bytes"), py::arg("backward"), py::arg("read_offsets"),
           py::arg("reads"), py::arg("value_op"), py::arg("value_bytes"), py::arg("saved"),
           py::arg("saved_at"), py::arg("alone_at"), py::arg("released_at"), py::arg("use_offsets"),
           py::arg("uses"), py::arg("possible"), py::arg("recipe_op_offsets"),
           py::arg("recipe_ops"), py::arg("parent_offsets"), py::arg("parents"), py::arg("ticks"));
  py::class_<VirtualTotals>(simulate, "Totals")
      .def_readonly("seconds", &VirtualTotals::seconds)
      .def_readonly("rebuild_s", &VirtualTotals::rebuild_s)
      .def_readonly("out_stall_s", &VirtualTotals::out_stall_s)
      .def_readonly("in_stall_s", &VirtualTotals::in_stall_s)
      .def_readonly("peak_bytes", &VirtualTotals::peak_bytes)
      .def_readonly("drops", &VirtualTotals::drops)
      .def_readonly("dropped_bytes", &VirtualTotals::dropped_bytes)
      .def_readonly("swap_outs", &VirtualTotals::swap_outs)
      .def_readonly("swapped_out_bytes", &VirtualTotals::swapped_out_bytes)
      .def_readonly("swap_ins", &VirtualTotals::swap_ins)
      .def_readonly("rebuilds", &VirtualTotals::rebuilds)
      .def_readonly("replayed_ops", &VirtualTotals::replayed_ops)
      .def_readonly("shortfalls", &VirtualTotals::shortfalls)
      .def_readonly("shortfall_bytes", &VirtualTotals::shortfall_bytes)
      .def_readonly("plan_overdue", &VirtualTotals::plan_overdue);
  py::class_<VirtualStep>(simulate, "VirtualStep")
      .def(
          py::init([](const StepColumns& step, std::shared_ptr<Plan> plan, int64_t budget_bytes,
                      bool drops, double out_bytes_per_s, double in_bytes_per_s, int64_t host_bytes,
                      int64_t min_bytes, bool is_cpu, int distance, int default_weight) {
            return std::make_unique<VirtualStep>(
                step,
                virtual_device(budget_bytes, drops, out_bytes_per_s, in_bytes_per_s, host_bytes,
                               min_bytes, is_cpu, distance, default_weight),
                std::move(plan));
          }),
          py::arg("step"), py::arg("plan").none(true), py::kw_only(), py::arg("budget_bytes"),
          py::arg("drops") = true, py::arg("out_bytes_per_s") = 0.0,
          py::arg("in_bytes_per_s") = 0.0, py::arg("host_bytes") = 0, py::arg("min_bytes") = 4096,
          py::arg("is_cpu") = false, py::arg("distance") = 2, py::arg("default_weight") = 0)
      .def(
          "set_pump",
          [](VirtualStep& step, py::function pump) {
            auto held = std::make_shared<py::function>(std::move(pump));
            step.set_pump([held](int64_t need_bytes) {
              py::gil_scoped_acquire gil;
              (*held)(need_bytes);
            });
          },
          "Called, as the runtime calls it, where a policy decides without a plan.")
      .def("drain_events",
           [](VirtualStep& step) {
             const auto rows = step.drain_events();
             return py::bytes(reinterpret_cast<const char*>(rows.data()),
                              rows.size() * sizeof(Event));
           })
      .def("publish",
           [](VirtualStep& step, const Ints& ids, const Floats& weights,
              const Column<int8_t>& exits, int distance) {
             step.publish(copied(ids), copied(weights), copied(exits),
                          static_cast<Distance>(distance));
           })
      .def("tick", &VirtualStep::tick)
      .def("queued_bytes",
           [](const VirtualStep& step) {
             return py::make_tuple(step.queued_out_bytes(), step.queued_in_bytes());
           })
      .def("run", &VirtualStep::run, py::call_guard<py::gil_scoped_release>(),
           "One step; the clock and the lanes go on from the one before.")
      .def(
          "log",
          [](const VirtualStep& step) {
            const auto& rows = step.rows();
            return py::bytes(reinterpret_cast<const char*>(rows.data()),
                             rows.size() * sizeof(LogRow));
          },
          "What happened in the last step, as rows of 64 bytes; LogRow in "
          "csrc/simulate/virtual_step.h.");
}

}  // namespace delta
