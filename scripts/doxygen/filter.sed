# What doxygen reads of a header. The comments at its head and behind a declaration, which are for people, count, too.
# <op> is a word to fill in and no tag, which doxygen knows of quoted text alone. A line that is set in by two is one of
# a list.

# Any other file stays as it is: the hold space has the first line.
1h
x
/^#pragma once/!{
x
b
}
x

1a\
/// @file
1,/^[^/]/s|^// |/// |
s%([;,})]) +// ([^<])%\1 ///< \2%
:tag
s%^(.*///([^"]|"[^"]*")*)<([a-z_]+)>%\1\&lt;\3\&gt;%
t tag
s%^( *///)   ([^ ])%\1 <br>\&emsp;\2%
