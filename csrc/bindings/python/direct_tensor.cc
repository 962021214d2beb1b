#include "direct_tensor.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "horoplug/horoplug.h"
#include "numpy_layout.h"

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

// Of a letter of the module struct, in the native byte order.
std::int32_t dtype_of(char letter) {
  struct Row {
    char letter;
    std::uint8_t code;  // of DLPack: 0: signed, 1: unsigned, 2: floating-point
    std::uint8_t bytes;
  };
  static constexpr Row kRows[] = {{'b', 0, 1}, {'h', 0, 2}, {'i', 0, 4}, {'l', 0, 8}, {'q', 0, 8},
                                  {'B', 1, 1}, {'H', 1, 2}, {'I', 1, 4}, {'L', 1, 8}, {'Q', 1, 8},
                                  {'e', 2, 2}, {'f', 2, 4}, {'d', 2, 8}};
  static_assert(sizeof(long) == 8);  // NOLINT(*-runtime-int)
  const auto* const row = std::ranges::find(kRows, letter, &Row::letter);
  if (row == std::end(kRows)) return kNoDtype;
  return dtype_of(DlDataType{row->code, static_cast<std::uint8_t>(8 * row->bytes), 1});
}
std::int32_t dtype_of(const Py_buffer& buffer) {
  const char* const format = buffer.format;
  return format == nullptr || format[0] == 0 || format[1] != 0 ? kNoDtype : dtype_of(format[0]);
}

bool describe(const NumpyArray& array, bool writable, TensorView& view) {
  const char order = array.dtype->byteorder;
  if (!array.has(NumpyArray::kRowMajor | NumpyArray::kAligned) || (order != '=' && order != '|') ||
      (writable && !array.has(NumpyArray::kWritable))) {
    return false;
  }
  view.data = array.data;
  view.shape = array.shape;
  view.ndim = array.ndim;
  view.dtype = dtype_of(array.dtype->type);
  return true;
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

const DlExchange* exchange_of(PyObject* capsule) {
  auto* api = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, DlExchange::kName));
  if (api == nullptr) return nullptr;
  while (api != nullptr && api->major != kDlMajor) api = api->previous;
  if (api != nullptr && api->describe != nullptr) return api;
  PyErr_SetString(PyExc_ValueError, "the tensors cannot be described by DLPack 1");
  return nullptr;
}

bool has_known_structure(PyTypeObject* type) {
  if (sizeof(PyObject) != static_cast<std::size_t>(2) * sizeof(void*)) return false;
  PyObject* const made =
      PyObject_CallFunction(reinterpret_cast<PyObject*>(type), "((ii)s)", 3, 2, "i");
  bool is_known = false;
  TensorView view, by_buffer;
  if (made != nullptr && Py_TYPE(made) == type && describe(made, true, by_buffer) &&
      describe(*reinterpret_cast<const NumpyArray*>(made), true, view)) {
    is_known = view.data == by_buffer.data && view.ndim == 2 && view.dtype == by_buffer.dtype &&
               std::equal(view.shape, view.shape + 2, by_buffer.shape);
  }
  close(by_buffer);
  Py_XDECREF(made);
  PyErr_Clear();
  return is_known;
}

bool open(const TensorKind& kind, PyObject* tensor, bool writable, TensorView& view) {
  if (Py_TYPE(tensor) != kind.type) return false;
  if (kind.by_structure) {
    return describe(*reinterpret_cast<const NumpyArray*>(tensor), writable, view) &&
           view.dtype != kNoDtype && has_elements(view.shape, view.ndim);
  }
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
