// Memory that co-located ranks share: a memfd between processes, or plain memory between threads.
//
// The memory has no name in a file system. The descriptor is passed over a Unix socket, and the
// memory is freed with the last process that maps it.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/fd.h"

namespace horoplug {

class Segment {
 public:
  // Sizes an empty memfd, seals it so that no process can shrink it, and maps it; called by the
  // owner. The memfd has to allow sealing (MFD_ALLOW_SEALING).
  static Segment create(const Fd& memfd, std::size_t bytes);
  // Maps `bytes` bytes of a memfd from `offset`, a multiple of the page size. Throws
  // std::system_error if the memfd is too small, or if a process could shrink it.
  static Segment map(const Fd& memfd, std::size_t bytes, std::size_t offset = 0);
  // Extends a memfd to at least `end` bytes. Any process that has the descriptor may call this at
  // any time.
  static void extend(const Fd& memfd, std::size_t end);
  // Returns the memory of a range of a memfd to the system. The range reads as zeros afterwards.
  static void discard(const Fd& memfd, std::size_t offset, std::size_t bytes);
  // Allocates zeroed memory of this process, for ranks that are threads.
  static Segment allocate(std::size_t bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return bytes_; }

 private:
  Segment(std::shared_ptr<std::byte> data, std::size_t bytes)
      : data_(std::move(data)), bytes_(bytes) {}
  static Segment map_file(int fd, std::size_t bytes, std::size_t offset);

  std::shared_ptr<std::byte> data_;
  std::size_t bytes_;
};

}  // namespace horoplug
