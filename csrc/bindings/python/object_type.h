// What every type in C needs whose objects refer to others. Such a type is a structure that begins
// with a PyObject, with a function references(): an array of pointers to its members.
#pragma once

#include <pybind11/pybind11.h>

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

// As a function of Python, it is a method of the objects of a class of which it is an attribute.
inline PyObject* bind(PyObject* self, PyObject* of, PyObject*) {
  return of == nullptr || of == Py_None ? Py_NewRef(self) : PyMethod_New(self, of);
}

template <typename Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

}  // namespace horoplug::python
