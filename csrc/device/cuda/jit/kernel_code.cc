#include "device/cuda/jit/kernel_code.h"

#include <mutex>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

class FileOnDemand {
 public:
  FileOnDemand(LibraryPaths places, int driver_version)
      : places_(std::move(places)), driver_version_(driver_version) {}

  std::shared_ptr<const KernelFile> get() {
    std::call_once(once_, [this] {
      file_ = std::make_shared<KernelFile>(open_kernel_file(places_, driver_version_));
    });
    return file_;
  }

 private:
  const LibraryPaths places_;
  const int driver_version_;
  std::once_flag once_;
  std::shared_ptr<const KernelFile> file_;
};

}  // namespace

bool needs_file(const Nvrtc& nvrtc, int capability) {
  return !nvrtc.ok() || (capability != 0 && capability < nvrtc.archs.front());
}

std::string no_code(const Nvrtc& nvrtc, const KernelFile& file, int capability) {
  const std::string device = "the GPU (sm_" + std::to_string(capability) + ")";
  const std::string of_nvrtc =
      !nvrtc.ok() ? nvrtc.problem : device + " is too old for NVRTC " + cuda_version(nvrtc.version);
  const std::string of_file = !file.ok() ? file.problem : file.path + ": has none for " + device;
  return of_nvrtc + "; and " + of_file +
         "; install nvidia-cuda-nvrtc of the driver's CUDA version, or compile the kernels with "
         "nvcc: make kernels";
}

ImageSource kernel_code(Nvrtc nvrtc, LibraryPaths places, int driver_version, KernelCache cache) {
  auto on_demand = std::make_shared<FileOnDemand>(std::move(places), driver_version);
  return [nvrtc = std::move(nvrtc), cache = std::move(cache), on_demand = std::move(on_demand)](
             const std::string& kernel, int capability) -> std::shared_ptr<const Image> {
    if (!needs_file(nvrtc, capability)) {
      return std::make_shared<Image>(kernel_image(nvrtc, cache, kernel, capability));
    }
    const std::shared_ptr<const KernelFile> file = on_demand->get();
    if (file->ok() && file->fits(capability)) return {file, &file->image};
    throw Error(HP_UNSUPPORTED, "tensors on a GPU need horoplug's kernels, which NVRTC compiles: " +
                                    no_code(nvrtc, *file, capability));
  };
}

}  // namespace horoplug::cuda
