// horoplug._native: the C ABI as Python sees it. The contract is horoplug/_native.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "direct_allreduce.h"
#include "direct_call.h"
#include "dlpack.h"
#include "engine.h"
#include "engine_config.h"
#include "enumerations.h"
#include "errors.h"
#include "horoplug/horoplug.h"
#include "memory.h"
#include "process.h"
#include "worker.h"

namespace py = pybind11;

namespace {

std::string gpu_capabilities(const std::vector<std::string>& files) {
  const std::vector<const char*> paths = horoplug::python::to_c_strings(files);
  char* text = nullptr;
  horoplug::python::check(horoplug::python::without_gil([&] {
    return hp_gpu_capabilities(paths.data(), static_cast<int32_t>(paths.size()), &text);
  }));
  const std::unique_ptr<char, decltype(&hp_free)> owner(text, hp_free);
  return text;
}

int nccl_version(const std::vector<std::string>& files) {
  const std::vector<const char*> paths = horoplug::python::to_c_strings(files);
  return horoplug::python::without_gil(
      [&] { return hp_nccl_version(paths.data(), static_cast<int32_t>(paths.size())); });
}

}  // namespace

// Without the GIL, see docs/design/free-threading.md.
PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  using namespace py::literals;

  if (hp_abi_version() != HP_ABI_VERSION) {
    throw py::import_error("libhoroplug.so has ABI version " + std::to_string(hp_abi_version()) +
                           ", expected " + std::to_string(HP_ABI_VERSION));
  }
  module.doc() = "The C core as Python sees it: a thin layer over the C ABI.";
  module.attr("ABI_VERSION") = HP_ABI_VERSION;
  module.attr("ANY_RANK") = HP_ANY_RANK;
  horoplug::python::add_process(module);
  horoplug::python::add_errors(module);
  horoplug::python::add_enumerations(module);
  horoplug::python::add_memory(module);
  horoplug::python::add_worker(module);
  horoplug::python::add_engine_config(module);
  horoplug::python::add_engine(module);
  horoplug::python::add_direct_calls(module);
  horoplug::python::add_direct_allreduce(module);
  horoplug::python::add_dlpack(module);
  module.def("version", [] { return std::string(hp_version()); });
  module.def("cpu_kernels", [] { return std::string(hp_cpu_kernels()); });
  module.def("algorithms", [] { return std::string(hp_algorithms()); });
  module.def("gpu_capabilities", &gpu_capabilities, "files"_a);
  module.def("nccl_version", &nccl_version, "files"_a);
}
