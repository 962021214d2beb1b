#include "memory.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

py::buffer_info writable_bytes(void* data, std::int64_t bytes) {
  return {data, 1, py::format_descriptor<std::uint8_t>::format(), 1, {bytes}, {1}};
}

// Address of the memory of an object with the buffer protocol; None if it does not export it.
py::object address_of(py::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return py::none();
  }
  py::object address = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(buffer.buf));
  PyBuffer_Release(&buffer);
  return address;
}

}  // namespace

py::buffer_info Memory::buffer() const { return writable_bytes(data_, bytes_); }

py::buffer_info Buffer::buffer() const { return writable_bytes(hp_buffer_data(buffer_), bytes()); }

py::dict DeviceMemory::interface() const {
  py::dict fields;
  fields["shape"] = py::make_tuple(bytes_);
  fields["typestr"] = "|u1";
  fields["data"] = py::make_tuple(address(), false);
  fields["strides"] = py::none();
  fields["stream"] = py::none();
  fields["version"] = 3;
  return fields;
}

void add_memory(py::module_& module) {
  using namespace py::literals;
  py::class_<Memory>(module, "Memory", py::buffer_protocol(),
                     "Memory that the core allocated for a result; freed when garbage collected.")
      .def_property_readonly("address", &Memory::address)
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_buffer(&Memory::buffer);

  py::class_<DeviceMemory>(
      module, "DeviceMemory",
      "Memory on a GPU that the core allocated; freed, in the order of its stream, when garbage "
      "collected.")
      .def_property_readonly("address", &DeviceMemory::address)
      .def_property_readonly("nbytes", &DeviceMemory::bytes)
      .def_property_readonly("device", &DeviceMemory::device)
      .def_property_readonly("stream", &DeviceMemory::stream)
      .def_property_readonly("__cuda_array_interface__", &DeviceMemory::interface);

  py::class_<Buffer>(module, "Buffer", py::buffer_protocol(),
                     "This rank's part of a shared buffer; freed when garbage collected.")
      .def_property_readonly("address", &Buffer::address)
      .def_property_readonly("nbytes", &Buffer::bytes)
      .def_buffer(&Buffer::buffer);

  module.def("address_of", &address_of, "buffer"_a);
}

}  // namespace horoplug::python
