#include "device/cuda/driver/toolkit.h"

#include "base/status.h"
#include "device/cuda/driver/nvrtc.h"

namespace horoplug::cuda {

std::shared_ptr<const Toolkit> open_toolkit(const LibraryPaths& places) {
  Driver driver = open_driver(places);
  std::string problem = driver.problem;
  if (problem.empty()) problem = start_driver(driver.api);
  if (!problem.empty()) {
    throw Error(HP_UNSUPPORTED, "tensors on a GPU cannot be used: " + problem);
  }
  auto toolkit = std::make_shared<Toolkit>();
  toolkit->driver = driver.api;
  toolkit->images = kernel_code(open_nvrtc(places, driver.version), places, driver.version,
                                KernelCache(KernelCache::default_folder()));
  const Nccl nccl = open_nccl(places);
  toolkit->nccl = nccl.api;
  toolkit->nccl_problem = nccl.problem;
  if (nccl.ok()) toolkit->nccl_version = nccl.version;
  return toolkit;
}

}  // namespace horoplug::cuda
