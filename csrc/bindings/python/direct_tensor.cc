#include "direct_tensor.h"

#include <cstring>

#include "horoplug/horoplug.h"

namespace horoplug::python {
namespace {

constexpr std::int32_t kNoDtype = -1;

bool has_elements(const std::int64_t* shape, std::int32_t ndim) {
  for (std::int32_t i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return false;
  }
  return true;
}

bool is_row_major(const DlTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// Complex numbers and truth values have rules of their own.
std::int32_t dtype_of(const DlDataType& type) {
  constexpr std::uint8_t kComplex = 5, kBool = 6;
  if (type.lanes != 1 || type.code == kComplex || type.code == kBool) return kNoDtype;
#define HP_DTYPE(number, NAME, Name, name, bytes, family, ctype, mantissa, nccl, since, mpi, \
                 numpy, dlpack, tf, xla)                                                     \
  if (type.code == (dlpack) && type.bits == 8 * (bytes)) return number;
#include "horoplug/dtypes.def"
  return kNoDtype;
}

// Of the native byte order, as the module struct writes it.
std::int32_t dtype_of(const Py_buffer& buffer) {
  constexpr std::uint8_t kSigned = 0, kUnsigned = 1, kFloat = 2;
  const char* const format = buffer.format;
  if (format == nullptr || format[0] == 0 || format[1] != 0) return kNoDtype;
  const auto bits = static_cast<std::uint8_t>(8 * buffer.itemsize);
  if (std::strchr("bhilq", format[0]) != nullptr) return dtype_of({kSigned, bits, 1});
  if (std::strchr("BHILQ", format[0]) != nullptr) return dtype_of({kUnsigned, bits, 1});
  if (std::strchr("efd", format[0]) != nullptr) return dtype_of({kFloat, bits, 1});
  return kNoDtype;
}

bool describe(PyObject* array, bool writable, TensorView& view) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array, &view.buffer, flags) != 0) return false;
  static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));
  view.data = view.buffer.buf;
  view.shape = reinterpret_cast<const std::int64_t*>(view.buffer.shape);
  view.ndim = view.buffer.ndim;
  view.dtype = dtype_of(view.buffer);
  return true;
}

// DLPack does not say that the memory has negated values.
bool describe(const DlExchange& api, PyObject* tensor, TensorView& view) {
  static PyObject* const is_negated = PyUnicode_InternFromString("is_neg");
  DlTensor found{};
  if (api.describe(tensor, &found) != 0 || found.device.type != kDlCpu || found.data == nullptr ||
      !is_row_major(found)) {
    return false;
  }
  view.data = static_cast<char*>(found.data) + found.byte_offset;
  view.shape = found.shape;
  view.ndim = found.ndim;
  view.dtype = dtype_of(found.dtype);
  return is_false(PyObject_CallMethodNoArgs(tensor, is_negated));
}

}  // namespace

bool open(const TensorKind& kind, PyObject* tensor, bool writable, TensorView& view) {
  if (Py_TYPE(tensor) != kind.type) return false;
  const bool is_described =
      kind.api == nullptr ? describe(tensor, writable, view) : describe(*kind.api, tensor, view);
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  return is_described && view.dtype != kNoDtype && has_elements(view.shape, view.ndim);
}

void close(TensorView& view) {
  if (view.buffer.obj != nullptr) PyBuffer_Release(&view.buffer);
}

bool is_false(PyObject* answer) {
  const bool is = answer == Py_False;
  Py_XDECREF(answer);
  return is;
}

}  // namespace horoplug::python
