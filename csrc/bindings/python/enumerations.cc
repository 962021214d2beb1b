#include "enumerations.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "horoplug/horoplug.h"

namespace py = pybind11;

namespace horoplug {
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
};

constexpr Member kOps[] = {
    {"ALLREDUCE", HP_ALLREDUCE},
    {"ALLGATHER", HP_ALLGATHER},
    {"BROADCAST", HP_BROADCAST},
    {"ALLTOALL", HP_ALLTOALL},
    {"REDUCESCATTER", HP_REDUCESCATTER},
    {"BARRIER", HP_BARRIER},
    {"JOIN", HP_JOIN},
    {"ADD_PROCESS_SET", HP_ADD_PROCESS_SET},
    {"REMOVE_PROCESS_SET", HP_REMOVE_PROCESS_SET},
    {"CREATE_BUFFER", HP_CREATE_BUFFER},
    {"REDUCE", HP_REDUCE},
    {"GATHER", HP_GATHER},
    {"SCATTER", HP_SCATTER},
    {"SEND", HP_SEND},
    {"RECV", HP_RECV},
};
static_assert(std::size(kOps) == HP_OP_COUNT, "an hp_op is missing");

constexpr Member kReduceOps[] = {
    {"AVERAGE", HP_AVERAGE}, {"SUM", HP_SUM}, {"ADASUM", HP_ADASUM},
    {"MIN", HP_MIN},         {"MAX", HP_MAX}, {"PRODUCT", HP_PRODUCT},
};
static_assert(std::size(kReduceOps) == HP_REDUCE_OP_COUNT, "an hp_reduce_op is missing");

// Adds an enum.IntEnum to the module.
template <std::size_t kCount>
void add_enumeration(py::module_& module, const char* name, const Member (&members)[kCount]) {
  py::dict values;
  for (const Member& member : members) values[member.name] = member.value;
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
  add_enumeration(module, "Status", kStatuses);
  add_enumeration(module, "Op", kOps);
  add_enumeration(module, "ReduceOp", kReduceOps);
  module.def("dtypes", &dtypes);
  module.def("dtype_size", &hp_dtype_size, "dtype"_a);
}

}  // namespace horoplug
