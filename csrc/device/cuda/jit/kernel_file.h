// Kernels that nvcc has compiled in advance, for systems without NVRTC. scripts/kernels.py writes
// the file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/cuda/driver/shared_library.h"
#include "device/cuda/jit/compile.h"

namespace horoplug::cuda {

// The header of the file. The code follows, in the form that the driver accepts. All numbers are
// little-endian.
struct KernelFileHeader {
  char magic[8];
  std::uint64_t source;    // source_key() of the sources that it was compiled from
  std::uint64_t bytes;     // of the code
  std::uint64_t hash;      // of the code
  std::int32_t version;    // nvcc's, as the driver counts: 12040 is 12.4
  std::int32_t ptx;        // 75: PTX for this architecture and all later ones; 0: none
  std::int32_t archs[14];  // 90: machine code for sm_90; 0: none
};
inline constexpr char kKernelFileMagic[] = "hpfatbi1";

struct KernelFile {
  Image image;             // one module, which has all kernels
  int version = 0;         // as in the header
  std::vector<int> archs;  // likewise
  int ptx = 0;             // likewise
  std::string path;
  std::string problem;  // one line; empty: it can be used

  bool ok() const { return problem.empty(); }
  // Whether a GPU of this compute capability (90 is 9.0) can run it. Machine code also runs on
  // later GPUs of the same major version.
  bool fits(int capability) const;
  std::string describe() const;  // "nvcc 13.1: sm_80, sm_90, PTX"
};

// The first file of `places.files` that is not a library, if it is complete, made from this
// library's kernels, and by an nvcc whose major version is not later than that of `driver_version`
// (0: any).
KernelFile open_kernel_file(const LibraryPaths& places, int driver_version,
                            std::uint64_t source = source_key());

}  // namespace horoplug::cuda
