// The table of driver functions, initialisation and error names.
#include <algorithm>
#include <iterator>

#include "tests/simulated/checked_function.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

struct ErrorName {
  CUresult result;
  const char* name;
};
constexpr ErrorName kErrorNames[] = {
    {kSuccess, "CUDA_SUCCESS"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND"},
    {kNotReady, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

}  // namespace

CUresult Functions::Init(unsigned) {
  machine().start();
  return kSuccess;
}

CUresult Functions::DriverGetVersion(int* version) {
  *version = machine().options.driver_version;
  return kSuccess;
}

CUresult Functions::GetErrorName(CUresult result, const char** text) {
  const auto* const found = std::find_if(std::begin(kErrorNames), std::end(kErrorNames),
                                         [=](const ErrorName& e) { return e.result == result; });
  if (found == std::end(kErrorNames)) return kInvalidValue;
  *text = found->name;
  return kSuccess;
}

CUresult Functions::GetErrorString(CUresult, const char** text) {
  *text = "simulated";
  return kSuccess;
}

void fill(DriverApi& api) {
#define SIMULATED_FUNCTION(name, symbol, parameters) \
  api.name = CheckedFunction<"cu" #name, &Functions::name>::call;
  HOROPLUG_CUDA_FUNCTIONS(SIMULATED_FUNCTION)
#undef SIMULATED_FUNCTION
  // These explain errors of all other functions, so that they never fail themselves.
  api.GetErrorName = Functions::GetErrorName;
  api.GetErrorString = Functions::GetErrorString;
}

}  // namespace horoplug::testing::simulated
