"""Before training: text, chats and other formats -> token stores."""
