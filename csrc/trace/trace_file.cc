#include "trace/trace_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/private_file.h"
#include "base/status.h"

namespace horoplug {
namespace {

constexpr std::string_view kClosing = "\n]";
// The smallest page size of a system; pages may be larger.
constexpr off_t kPage = 4096;
constexpr off_t kFewestBlanks = 64 << 10;
constexpr off_t kMostBlanks = 8 << 20;

}  // namespace

// The names of tensors are for nobody else.
TraceFile::TraceFile(std::string path)
    : path_(std::move(path)), fd_(open_private_file(path_, "the timeline cannot be written to")) {}

TraceFile::~TraceFile() { ::close(fd_); }

void TraceFile::fail(int error) const {
  throw Error(HP_INVALID_ARGUMENT, "the timeline cannot be written to " + path_ + ": " +
                                       std::generic_category().message(error));
}

int TraceFile::write_at(off_t at, std::string_view text) const {
  while (!text.empty()) {
    const ssize_t written = ::pwrite(fd_, text.data(), text.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    at += written;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

void TraceFile::begin(std::string_view event) {
  if (::ftruncate(fd_, 0) != 0) fail(errno);
  const std::string text = std::string("[\n").append(event).append(kClosing);
  if (const int error = write_at(0, text); error != 0) fail(error);
  size_ = static_cast<off_t>(text.size());
  end_ = size_ - static_cast<off_t>(kClosing.size());
  extend();
}

void TraceFile::extend() {
  const off_t bigger = size_ + std::clamp(size_, kFewestBlanks, kMostBlanks);
  std::string blanks(static_cast<std::size_t>(bigger - size_), ' ');
  blanks[blanks.size() - kClosing.size()] = kClosing[0];
  int error = write_at(size_, blanks);
  if (error == 0) {
    error = write_at(size_ - 1, " ");
    if (error == 0) error = write_at(bigger - 1, kClosing.substr(1));
    if (error != 0) write_at(size_ - 1, kClosing.substr(1));
  }
  if (error != 0) {
    static_cast<void>(::ftruncate(fd_, size_));
    fail(error);
  }
  size_ = bigger;
}

void TraceFile::add(std::string_view event) {
  if (event.size() > kMaxEvent) return;
  const auto bytes = static_cast<off_t>(event.size()) + 2;
  off_t at = end_ + static_cast<off_t>(pending_.size());
  if (at / kPage != (at + bytes - 1) / kPage) {
    flush();
    at = end_ = (end_ + kPage - 1) / kPage * kPage;
  }
  if (at + bytes > size_ - static_cast<off_t>(kClosing.size())) {
    flush();
    extend();
  }
  pending_.append(",\n").append(event);
}

void TraceFile::flush() {
  if (pending_.empty()) return;
  struct stat found{};
  if (::fstat(fd_, &found) != 0) fail(errno);
  if (found.st_size != size_) {
    throw Error(HP_INVALID_ARGUMENT,
                "the timeline " + path_ + " was changed by somebody else; it ends here");
  }
  if (const int error = write_at(end_, pending_); error != 0) fail(error);
  end_ += static_cast<off_t>(pending_.size());
  pending_.clear();
}

void TraceFile::finish() {
  flush();
  // The end of a page may have been skipped; it contains blanks.
  if (const int error = write_at(end_, kClosing); error != 0) fail(error);
  size_ = end_ + static_cast<off_t>(kClosing.size());
  if (::ftruncate(fd_, size_) != 0) fail(errno);
}

}  // namespace horoplug
