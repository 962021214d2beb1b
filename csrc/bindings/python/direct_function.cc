#include "direct_function.h"

#include <utility>

#include "dlpack_layout.h"
#include "object_type.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

bool find_kind(const DirectFunction& self, TensorKind& kind) {
  kind = {};
  if (self.tensor_type == Py_None) return true;
  kind.type = reinterpret_cast<PyTypeObject*>(self.tensor_type);
  if (self.exchange == Py_None) {
    kind.by_structure = has_known_structure(kind.type);
    return true;
  }
  kind.api = exchange_of(self.exchange);
  return kind.api != nullptr;
}

// Takes over a description. Returns false with an exception.
bool describe(DirectFunction& self, PyObject* args, PyObject* keywords) {
  // The parser takes them as char* for the sake of old callers, and does not change them.
  std::array<const char*, 17> names = {
      "python",     "calls",      "failed",  "prefix",  "operation", "tensor_type",
      "exchange",   "empty_like", "empty",   "collect", "takes",     "output",
      "reductions", "root",       "has_tag", "blocks",  nullptr};
  PyObject *python, *calls, *failed, *prefix;
  PyObject *tensor_type = Py_None, *exchange = Py_None, *empty_like = Py_None, *empty = Py_None;
  PyObject *collect = Py_None, *root = Py_None;
  int takes = 0, output = 0;
  if (PyArg_ParseTupleAndKeywords(
          args, keywords, "OOOUi|$OOOOOiiIOpp", const_cast<char**>(names.data()), &python, &calls,
          &failed, &prefix, &self.operation, &tensor_type, &exchange, &empty_like, &empty, &collect,
          &takes, &output, &self.reductions, &root, &self.has_tag, &self.blocks) == 0) {
    return false;
  }
  self.takes = static_cast<Takes>(takes);
  self.output = static_cast<DirectOutput>(output);
  for (const auto& [member, given] : {std::pair{&self.python, python},
                                      {&self.calls, calls},
                                      {&self.tensor_type, tensor_type},
                                      {&self.exchange, exchange},
                                      {&self.empty_like, empty_like},
                                      {&self.empty, empty},
                                      {&self.failed, failed},
                                      {&self.collect, collect},
                                      {&self.prefix, prefix},
                                      {&self.root, root}}) {
    *member = Py_NewRef(given);
  }
  if (root != Py_None) PyUnicode_InternInPlace(&self.root);
  self.named = PyDict_New();
  if (self.named == nullptr || !find_kind(self, self.kind)) return false;
  self.shared = &py::handle(calls).cast<const DirectCalls&>();
  return true;
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  auto& self = self_of<DirectFunction>(made);
  self.vectorcall = call_directly;
  if (describe(self, args, keywords)) return made;
  Py_DECREF(made);
  return nullptr;
}

}  // namespace

void add_direct_function(py::module_& module) {
  FunctionType<DirectFunction>::add_to(module, "horoplug._native.DirectFunction", create);
}

}  // namespace horoplug::python
