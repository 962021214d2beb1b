// What every type in C needs whose objects refer to others. Such a type is a structure that begins
// with a PyObject, with a function references(): an array of pointers to its members.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <array>
#include <cstddef>

namespace horoplug::python {

template <typename Self>
Self& self_of(PyObject* object) {
  return *reinterpret_cast<Self*>(object);
}

template <typename Self>
int traverse(PyObject* object, visitproc visit, void* arg) {
  for (auto member : Self::references()) Py_VISIT(self_of<Self>(object).*member);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

template <typename Self>
int clear(PyObject* object) {
  for (auto member : Self::references()) Py_CLEAR(self_of<Self>(object).*member);
  return 0;
}

template <typename Self>
void destroy(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear<Self>(object);
  PyTypeObject* const type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

template <typename Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

// What a type has besides whose objects stand in place of functions of Python and behave as these
// do. Such a structure also has the members vectorcall, dict and weak_references.
template <typename Self>
struct FunctionType {
  // It is a method of the objects of a class of which it is an attribute.
  static PyObject* bind(PyObject* self, PyObject* of, PyObject*) {
    return of == nullptr || of == Py_None ? Py_NewRef(self) : PyMethod_New(self, of);
  }
  // It is pickled by its name, and is its own copy.
  static PyObject* reduce(PyObject* self, PyObject*) {
    return PyObject_GetAttrString(self, "__qualname__");
  }
  static PyObject* represent(PyObject* self) {
    PyObject* const name = PyObject_GetAttrString(self, "__qualname__");
    if (name == nullptr) return nullptr;
    PyObject* const text = PyUnicode_FromFormat("<function %U>", name);
    Py_DECREF(name);
    return text;
  }
  static void destroy(PyObject* object) {
    if (self_of<Self>(object).weak_references != nullptr) PyObject_ClearWeakRefs(object);
    python::destroy<Self>(object);
  }

  static inline std::array methods = {PyMethodDef{"__reduce__", reduce, METH_NOARGS, nullptr},
                                      PyMethodDef{}};
  static inline std::array members = {
      PyMemberDef{"__vectorcalloffset__", T_PYSSIZET, offsetof(Self, vectorcall), READONLY,
                  nullptr},
      PyMemberDef{"__dictoffset__", T_PYSSIZET, offsetof(Self, dict), READONLY, nullptr},
      PyMemberDef{"__weaklistoffset__", T_PYSSIZET, offsetof(Self, weak_references), READONLY,
                  nullptr},
      PyMemberDef{}};
  static inline std::array attributes = {
      PyGetSetDef{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      PyGetSetDef{}};

  // Adds the type to a module. `create`: its tp_new. `flags`: further ones.
  static void add_to(pybind11::module_& module, const char* name, newfunc create,
                     unsigned int flags = 0) {
    std::array slots = {slot(Py_tp_new, create),
                        slot(Py_tp_call, PyVectorcall_Call),
                        slot(Py_tp_traverse, traverse<Self>),
                        slot(Py_tp_clear, clear<Self>),
                        slot(Py_tp_dealloc, destroy),
                        slot(Py_tp_descr_get, bind),
                        slot(Py_tp_repr, represent),
                        PyType_Slot{Py_tp_methods, methods.data()},
                        PyType_Slot{Py_tp_members, members.data()},
                        PyType_Slot{Py_tp_getset, attributes.data()},
                        PyType_Slot{0, nullptr}};
    constexpr unsigned int kFlags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    PyType_Spec spec = {name, sizeof(Self), 0, kFlags | flags, slots.data()};
    const auto type = pybind11::reinterpret_steal<pybind11::object>(PyType_FromSpec(&spec));
    if (!type) throw pybind11::error_already_set();
    module.attr(type.attr("__name__")) = type;
  }
};

}  // namespace horoplug::python
