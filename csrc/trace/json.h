// Escaping of text for JSON.
#pragma once

#include <string>
#include <string_view>

namespace horoplug {

// Appends `text` as a JSON string with quotes. Bytes that are not UTF-8 become U+FFFD, because
// users choose the names. Text longer than about `limit` bytes is truncated.
void append_json_string(std::string& json, std::string_view text, std::size_t limit = 1024);

}  // namespace horoplug
