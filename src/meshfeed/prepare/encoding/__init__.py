"""Records -> tokens: text, chats, and samples with images and audio."""
