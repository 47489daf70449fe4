"""Records -> tokens: text, chats, and samples with images, audio and video."""
