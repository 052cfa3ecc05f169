#pragma once
#include <string>

namespace cf::test {

/// A tokenizer.json as tokenizers 0.23.3 saves it: byte-level BPE of 42 tokens, two of them special, trained on one
/// sentence, and four added tokens. The vocabulary lacks most bytes.
inline const std::string kSmallTokenizer =
    R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":0,"content":"<|endoftext|>",)"
    R"("single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},{"id":1,)"
    R"("content":"<|padding|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,)"
    R"("special":true},{"id":42,"content":"   ","single_word":false,"lstrip":false,"rstrip":false,)"
    R"("normalized":true,"special":false},{"id":43,"content":"  ","single_word":false,"lstrip":false,)"
    R"("rstrip":false,"normalized":true,"special":false},{"id":44,"content":"né🙂","single_word":false,)"
    R"("lstrip":false,"rstrip":false,"normalized":true,"special":false},{"id":45,"content":"é",)"
    R"("single_word":false,"lstrip":false,"rstrip":false,"normalized":true,"special":false}],)"
    R"("normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,)"
    R"("trim_offsets":true,"use_regex":true},"post_processor":{"type":"ByteLevel","add_prefix_space":true,)"
    R"("trim_offsets":true,"use_regex":true},"decoder":{"type":"ByteLevel","add_prefix_space":true,)"
    R"("trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,)"
    R"("continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,)"
    R"("ignore_merges":false,"vocab":{"<|endoftext|>":0,"<|padding|>":1,",":2,"a":3,"c":4,"d":5,"e":6,"f":7,)"
    R"("g":8,"h":9,"l":10,"o":11,"r":12,"t":13,"w":14,"©":15,"¼":16,"Ã":17,"â":18,"ð":19,"ĉ":20,"Ċ":21,"Ġ":22,)"
    R"("Ĥ":23,"ĥ":24,"ĺ":25,"Ļ":26,"Ł":27,"he":28,"ll":29,"hell":30,"hello":31,"ld":32,"or":33,"wor":34,)"
    R"("Ġhello":35,"Ġwor":36,"Ġworld":37,"af":38,"caf":39,"gr":40,"re":41},"merges":[["h","e"],["l","l"],["he",)"
    R"("ll"],["hell","o"],["l","d"],["o","r"],["w","or"],["Ġ","hello"],["Ġ","wor"],["Ġwor","ld"],["a","f"],)"
    R"(["c","af"],["g","r"],["r","e"]]}})";

}  // namespace cf::test
