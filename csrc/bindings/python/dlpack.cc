#include "dlpack.h"

#include <pybind11/critical_section.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dlpack_layout.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

// As it was before version 1.
struct Unversioned {
  DlTensor tensor;
  void* context;
  void (*deleter)(Unversioned*);

  static constexpr const char* kName = "dltensor";
  static constexpr const char* kUsedName = "used_dltensor";
};
struct Versioned {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(Versioned*);
  std::uint64_t flags;
  DlTensor tensor;

  static constexpr const char* kName = "dltensor_versioned";
  static constexpr const char* kUsedName = "used_dltensor_versioned";
};
constexpr std::uint32_t kMinor = 0;
constexpr std::uint64_t kReadOnly = 1, kCopied = 2;

template <typename Managed>
void end(Managed* managed) {
  if (managed->deleter != nullptr) managed->deleter(managed);
}

// Another library's array, which is given back with this object, once.
class DlpackTensor {
 public:
  template <typename Managed>
  static std::unique_ptr<DlpackTensor> take(py::handle capsule) {
    auto* const managed =
        static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), Managed::kName));
    if (managed == nullptr) throw py::error_already_set();
    // This name transfers the ownership: from now on this object must release the array.
    if (PyCapsule_SetName(capsule.ptr(), Managed::kUsedName) != 0) throw py::error_already_set();
    auto taken = std::unique_ptr<DlpackTensor>(new DlpackTensor);
    taken->managed_ = {managed, [](void* it) {
                         const py::error_scope kept;  // an exception may be propagating
                         end(static_cast<Managed*>(it));
                       }};
    taken->read(*managed);
    return taken;
  }

  std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(tensor_->data) + tensor_->byte_offset;
  }
  std::pair<int, int> device() const { return {tensor_->device.type, tensor_->device.id}; }
  std::tuple<int, int, int> dtype() const {
    return {tensor_->dtype.code, tensor_->dtype.bits, tensor_->dtype.lanes};
  }
  py::tuple shape() const { return numbers(tensor_->shape); }
  py::object strides() const {
    if (tensor_->strides == nullptr) return py::none();
    return numbers(tensor_->strides);
  }
  bool read_only() const { return (flags_ & kReadOnly) != 0; }
  bool copied() const { return (flags_ & kCopied) != 0; }

 private:
  DlpackTensor() : managed_(nullptr, [](void*) {}) {}

  void read(const Unversioned& managed) { tensor_ = &managed.tensor; }
  void read(const Versioned& managed) {
    if (managed.major != kDlMajor) {  // of another one, nothing else can be read
      throw py::buffer_error("the array is given by DLPack " + std::to_string(managed.major) + "." +
                             std::to_string(managed.minor) + ", and horoplug knows version 1");
    }
    tensor_ = &managed.tensor;
    flags_ = managed.flags;
  }

  py::tuple numbers(const std::int64_t* values) const {
    const auto count = static_cast<std::size_t>(tensor_->ndim);
    py::tuple made(count);
    for (std::size_t i = 0; i < count; ++i) made[i] = values[i];
    return made;
  }

  std::unique_ptr<void, void (*)(void*)> managed_;
  const DlTensor* tensor_ = nullptr;
  std::uint64_t flags_ = 0;
};

std::unique_ptr<DlpackTensor> take_dlpack(py::handle capsule) {
  const py::scoped_critical_section one_thread(capsule);  // only one may find it unused
  if (PyCapsule_IsValid(capsule.ptr(), Versioned::kName) != 0) {
    return DlpackTensor::take<Versioned>(capsule);
  }
  if (PyCapsule_IsValid(capsule.ptr(), Unversioned::kName) != 0) {
    return DlpackTensor::take<Unversioned>(capsule);
  }
  throw py::buffer_error("__dlpack__ has returned no capsule of DLPack, or one that is used");
}

// An array of the core, until its consumer releases it.
template <typename Managed>
struct Given {
  Managed managed{};
  std::vector<std::int64_t> shape, strides;
  py::object owner;

  // May be called by any thread, with or without the GIL.
  static void destroy(Managed* managed) {
    if (Py_IsInitialized() == 0) return;  // after finalisation the owner cannot be released
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;
    delete static_cast<Given*>(managed->context);
  }
};

template <typename Managed>
py::capsule give(Managed head, const DlTensor& tensor, std::vector<std::int64_t> shape,
                 py::object owner) {
  auto given = std::make_unique<Given<Managed>>();
  given->managed = head;
  given->shape = std::move(shape);
  given->strides.resize(given->shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = given->shape.size(); i-- > 0; stride *= given->shape[i]) {
    given->strides[i] = stride;
  }
  given->owner = std::move(owner);
  Managed& managed = given->managed;
  managed.tensor = tensor;
  managed.tensor.ndim = static_cast<std::int32_t>(given->shape.size());
  managed.tensor.shape = given->shape.data();
  managed.tensor.strides = given->strides.data();
  managed.context = given.get();
  managed.deleter = Given<Managed>::destroy;
  PyObject* const capsule = PyCapsule_New(&managed, Managed::kName, [](PyObject* unused) {
    if (PyCapsule_IsValid(unused, Managed::kName) == 0) return;  // a consumer has taken it
    end(static_cast<Managed*>(PyCapsule_GetPointer(unused, Managed::kName)));
  });
  if (capsule == nullptr) throw py::error_already_set();
  (void)given.release();  // NOLINT(bugprone-unused-return-value): the capsule has it now
  return py::reinterpret_steal<py::capsule>(capsule);
}

py::capsule give_dlpack(py::object owner, std::uintptr_t address, std::pair<int, int> device,
                        std::pair<int, int> dtype, std::vector<std::int64_t> shape,
                        bool versioned) {
  DlTensor tensor{};
  tensor.data = reinterpret_cast<void*>(address);
  tensor.device = {device.first, device.second};
  tensor.dtype = {static_cast<std::uint8_t>(dtype.first), static_cast<std::uint8_t>(dtype.second),
                  1};
  if (!versioned) return give(Unversioned{}, tensor, std::move(shape), std::move(owner));
  Versioned head{};
  head.major = kDlMajor;
  head.minor = kMinor;
  return give(head, tensor, std::move(shape), std::move(owner));
}

}  // namespace

void add_dlpack(py::module_& module) {
  using namespace py::literals;
  py::class_<DlpackTensor>(module, "DlpackTensor")
      .def_property_readonly("address", &DlpackTensor::address)
      .def_property_readonly("device", &DlpackTensor::device)
      .def_property_readonly("dtype", &DlpackTensor::dtype)
      .def_property_readonly("shape", &DlpackTensor::shape)
      .def_property_readonly("strides", &DlpackTensor::strides)
      .def_property_readonly("read_only", &DlpackTensor::read_only)
      .def_property_readonly("copied", &DlpackTensor::copied);
  module.def("take_dlpack", &take_dlpack, "capsule"_a);
  module.def("give_dlpack", &give_dlpack, "owner"_a, "address"_a, "device"_a, "dtype"_a, "shape"_a,
             "versioned"_a);
}

}  // namespace horoplug::python
