#include "bindings/dry_run.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "bindings/callbacks.h"
#include "dry_run/dry_run.h"

namespace delta {
namespace {

using dry_run::Answer;

// An argument as Python's ops take it; dtypes and their like are numbers in C++.
py::object argument_of(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isInt()) {
    c10::TypePtr type = argument.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
            torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
      case c10::TypeKind::LayoutType:
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
            torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
      case c10::TypeKind::MemoryFormatType:
        return py::reinterpret_borrow<py::object>(
            torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
      default:
        break;
    }
  }
  return torch::jit::toPyObject(value);
}

dry_run::Returned returned_of(const py::handle& told) {
  if (told.is_none()) {
    return dry_run::Nothing{};
  }
  if (py::isinstance<py::int_>(told)) {
    return dry_run::Argument{told.cast<size_t>()};
  }
  const auto parts = told.cast<py::tuple>();
  auto sizes = parts[0].cast<std::vector<int64_t>>();
  auto strides = parts[1].cast<std::vector<int64_t>>();
  if (parts.size() == 3) {
    return dry_run::NewTensor{std::move(sizes), std::move(strides),
                              parts[2].cast<at::ScalarType>()};
  }
  return dry_run::ViewOf{parts[2].cast<size_t>(), std::move(sizes), std::move(strides),
                         parts[3].cast<int64_t>()};
}

// `told` is a pair: for each return of the op the tensors that it is made of, or, where it is none,
// what it is in a tuple of one; and what was resized.
Answer answer_of(const c10::OperatorHandle& op, const py::tuple& told) {
  Answer answer;
  size_t i = 0;
  for (const auto& of_one : told[0].cast<py::list>()) {
    answer.returns.emplace_back();
    answer.plain.emplace_back();
    if (py::isinstance<py::tuple>(of_one)) {
      answer.plain.back() =
          torch::jit::toIValue(of_one.cast<py::tuple>()[0], op.schema().returns().at(i).type());
    } else {
      for (const auto& each : of_one.cast<py::list>()) {
        answer.returns.back().push_back(returned_of(each));
      }
    }
    ++i;
  }
  for (const auto& each : told[1].cast<py::list>()) {
    const auto parts = each.cast<py::tuple>();
    answer.resized.push_back({parts[0].cast<size_t>(), parts[1].cast<std::vector<int64_t>>()});
  }
  return answer;
}

void enter(py::object ask) {
  auto holder = shared(std::move(ask));
  dry_run::enter([holder](const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                          const std::vector<at::Tensor>& tensors, bool known,
                          bool numbers) -> std::optional<Answer> {
    py::gil_scoped_acquire gil;
    const auto& schema = op.schema().arguments();
    py::list positional;
    py::dict named;
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto argument = argument_of(schema[i], arguments[i]);
      if (schema[i].kwarg_only()) {
        named[py::str(schema[i].name())] = std::move(argument);
      } else {
        positional.append(std::move(argument));
      }
    }
    py::list plain;
    for (const auto& t : tensors) {
      plain.append(py::cast(t));
    }
    const auto function =
        py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
    const py::object told = (*holder)(function, positional, named, plain, known, numbers);
    return told.is_none() ? std::nullopt
                          : std::optional<Answer>(answer_of(op, told.cast<py::tuple>()));
  });
}

}  // namespace

void bind_dry_run(py::module_& m) {
  auto dry = m.def_submodule("dry_run", "Ops say what they return, and none computes.");
  dry.def("enter", &enter, "Of this thread; `ask` is told an op and says what it returns.");
  dry.def("leave", &dry_run::leave);
  dry.def("is_entered", &dry_run::is_entered);
  dry.def("is_known", &dry_run::is_known, "Whether a tensor's content is what it would be.");
}

}  // namespace delta
