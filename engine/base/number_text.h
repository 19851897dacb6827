// Numbers in messages. absl::StrCat writes six digits, by which a value just beyond a limit reads
// like the limit.
#pragma once

#include <string>

namespace writescope {

// The shortest text that reads back as the same value; of one that came as a float, as the same
// float.
std::string NumberText(double value);

}  // namespace writescope
