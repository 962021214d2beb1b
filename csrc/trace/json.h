// Text that goes into JSON.
#pragma once

#include <string>
#include <string_view>

namespace horoplug {

// Appends `text` as a JSON string, quotes included. Bytes that are no UTF-8 become U+FFFD, because
// names come from users. Text that would take more than about `limit` bytes is cut.
void append_json_string(std::string& json, std::string_view text, std::size_t limit = 1024);

}  // namespace horoplug
