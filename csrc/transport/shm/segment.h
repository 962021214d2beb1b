// A piece of memory that co-located ranks share: a memfd, or plain memory between threads.
//
// There is no name in any file system: the descriptor was passed over a Unix socket, and the memory
// is gone with the last process that maps it.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/fd.h"

namespace horoplug {

class Segment {
 public:
  // Sizes an empty memfd and maps it (the owner's side).
  static Segment create(const Fd& memfd, std::size_t bytes);
  // Maps `bytes` bytes of a memfd from `offset`, a multiple of the page size. Throws
  // std::system_error if it is smaller than that.
  static Segment map(const Fd& memfd, std::size_t bytes, std::size_t offset = 0);
  // Has a memfd reach at least to `end`. Any process that has it may call this at any time.
  static void extend(const Fd& memfd, std::size_t end);
  // Gives the memory of a part of a memfd back to the system; it reads as zeros then.
  static void discard(const Fd& memfd, std::size_t offset, std::size_t bytes);
  // Zeroed memory of this process, for ranks that are threads.
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
