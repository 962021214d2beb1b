#include "enumerations.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "direct_function.h"
#include "horoplug/horoplug.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

struct Member {
  const char* name;
  int value;
};

constexpr Member kStatuses[] = {
    {"OK", HP_OK},
    {"IN_PROGRESS", HP_IN_PROGRESS},
    {"INVALID_ARGUMENT", HP_INVALID_ARGUMENT},
    {"DUPLICATE_NAME", HP_DUPLICATE_NAME},
    {"UNSUPPORTED", HP_UNSUPPORTED},
    {"MISMATCH", HP_MISMATCH},
    {"DEADLOCK", HP_DEADLOCK},
    {"TIMEOUT", HP_TIMEOUT},
    {"ABORTED", HP_ABORTED},
    {"SHUT_DOWN", HP_SHUT_DOWN},
    {"INTERNAL", HP_INTERNAL},
    {"LAYOUT_MISMATCH", HP_LAYOUT_MISMATCH},
};
static_assert(std::size(kStatuses) == HP_STATUS_COUNT, "an hp_status is missing");

constexpr Member kReduceOps[] = {
    {"AVERAGE", HP_AVERAGE}, {"SUM", HP_SUM}, {"ADASUM", HP_ADASUM},
    {"MIN", HP_MIN},         {"MAX", HP_MAX}, {"PRODUCT", HP_PRODUCT},
};
static_assert(std::size(kReduceOps) == HP_REDUCE_OP_COUNT, "an hp_reduce_op is missing");

constexpr Member kTunables[] = {
    {"BUCKETS", HP_TUNE_BUCKETS},
    {"CHUNKS", HP_TUNE_CHUNKS},
    {"LANES", HP_TUNE_LANES},
    {"ALGORITHMS", HP_TUNE_ALGORITHMS},
};

constexpr Member kMpiOnGpu[] = {
    {"NOTHING", HP_MPI_ON_GPU_NOTHING},
    {"MOVES", HP_MPI_ON_GPU_MOVES},
    {"ALL", HP_MPI_ON_GPU_ALL},
};

constexpr Member kTakes[] = {
    {"NOTHING", static_cast<int>(Takes::kNothing)},
    {"TENSOR", static_cast<int>(Takes::kTensor)},
    {"GROUP", static_cast<int>(Takes::kGroup)},
};

constexpr Member kDirectOutputs[] = {
    {"NONE", static_cast<int>(DirectOutput::kNone)},
    {"INPUT", static_cast<int>(DirectOutput::kInput)},
    {"LIKE_INPUT", static_cast<int>(DirectOutput::kLikeInput)},
    {"SAME_ROWS", static_cast<int>(DirectOutput::kSameRows)},
    {"ALL_ROWS", static_cast<int>(DirectOutput::kAllRows)},
    {"PART_ROWS", static_cast<int>(DirectOutput::kPartRows)},
    {"ROOT_ROWS", static_cast<int>(DirectOutput::kRootRows)},
    {"CORE_ROWS", static_cast<int>(DirectOutput::kCoreRows)},
};

// The names of the operations, in capitals.
py::dict operations() {
  py::dict values;
  for (int code = 0; code < HP_OP_COUNT; ++code) {
    values[py::str(hp_op_name(code)).attr("upper")()] = code;
  }
  return values;
}

template <std::size_t kCount>
py::dict values_of(const Member (&members)[kCount]) {
  py::dict values;
  for (const Member& member : members) values[member.name] = member.value;
  return values;
}

// Adds an enum.IntEnum to the module.
void add_enumeration(py::module_& module, const char* name, const py::dict& values) {
  const py::object enumeration = py::module_::import("enum").attr("IntEnum");
  module.attr(name) = enumeration(name, values, py::arg("module") = "horoplug._native");
}

// Code, name, bytes, MPI's name, the package of NumPy's type, DLPack's code.
using DType = std::tuple<int, std::string, int, std::string, std::string, int>;

std::vector<DType> dtypes() {
  return {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, ...)                                                                      \
  {code, #name, bytes, mpi, numpy, dlpack},
#include "horoplug/dtypes.def"
  };
}

}  // namespace

void add_enumerations(py::module_& module) {
  using namespace py::literals;
  add_enumeration(module, "Status", values_of(kStatuses));
  add_enumeration(module, "Op", operations());
  add_enumeration(module, "ReduceOp", values_of(kReduceOps));
  add_enumeration(module, "Tunable", values_of(kTunables));
  add_enumeration(module, "MpiOnGpu", values_of(kMpiOnGpu));
  add_enumeration(module, "Takes", values_of(kTakes));
  add_enumeration(module, "DirectOutput", values_of(kDirectOutputs));
  module.def("dtypes", &dtypes);
  module.def("dtype_size", &hp_dtype_size, "dtype"_a);
}

}  // namespace horoplug::python
