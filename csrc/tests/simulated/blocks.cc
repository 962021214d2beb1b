#include "tests/simulated/blocks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace horoplug::testing::simulated {
namespace {

constexpr std::size_t kAlignment = 512;  // as the GPU's allocations

}  // namespace

Blocks::~Blocks() {
  for (const auto& [name, block] : blocks_) unmap(block);
}

std::byte* Blocks::open(const std::string& name, std::size_t bytes, bool make) {
  const std::lock_guard lock(mutex_);
  const auto known = blocks_.find(name);
  if (known != blocks_.end()) return known->second.data;
  std::byte* const data = map(name, bytes, make);
  if (data != nullptr) blocks_[name] = {data, bytes};
  return data;
}

void Blocks::close(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto known = blocks_.find(name);
  if (known == blocks_.end()) return;
  unmap(known->second);
  blocks_.erase(known);
}

void Blocks::remove(const std::string& name) {
  if (is_shared()) ::unlink((folder_ + "/" + name).c_str());
}

std::byte* Blocks::map(const std::string& name, std::size_t bytes, bool make) const {
  bytes = std::max<std::size_t>(bytes, 1);
  if (!is_shared()) {
    if (!make) return nullptr;
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* const data = std::aligned_alloc(kAlignment, rounded);
    if (data != nullptr) std::memset(data, 0, rounded);
    return static_cast<std::byte*>(data);
  }
  const int fd =
      ::open((folder_ + "/" + name).c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (!make || ::ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

void Blocks::unmap(const Block& block) const {
  if (is_shared()) {
    ::munmap(block.data, std::max<std::size_t>(block.bytes, 1));
  } else {
    std::free(block.data);
  }
}

}  // namespace horoplug::testing::simulated
