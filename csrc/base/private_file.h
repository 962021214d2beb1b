// Opens files that the library writes for its user: private ones, and no other file than the user
// has named.
#pragma once

#include <string>

namespace horoplug {

// Opens or creates a regular file for writing, keeps its content, and makes it readable for its
// owner only. Returns the descriptor. Throws Error, whose text begins with `what` and the path: for
// a symbolic link or a further hard link, by which another user could let us overwrite any file,
// and for a file of another user. `what`: for example "the timeline cannot be written to".
int open_private_file(const std::string& path, const std::string& what);

}  // namespace horoplug
